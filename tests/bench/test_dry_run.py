# SPDX-License-Identifier: Apache-2.0
"""The whole bench on the CPU: the ops' reference, a wall clock, tiny shapes."""

from __future__ import annotations

import json

import bench_verify
import pytest

COMMAND = ["--device", "cpu", "--peers", "", "--pool", "1000", "--no-plots", "--shapes", "1,2,3,20", "2,1,2,9"]


def rows_of(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_a_second_run_measures_nothing_again(tmp_path, capsys):
    out = tmp_path / "verify.json"
    assert bench_verify.main([*COMMAND, "--out", str(out), "--commit", "abc"]) == 0
    first = [row for row in rows_of(out) if row["impl"] == "portable"]
    assert {(row["bs"], row["slots"]) for row in first} == {
        (1, "random"), (2, "random"), (1, "contiguous"), (2, "contiguous")}  # fmt: skip
    assert bench_verify.main([*COMMAND, "--out", str(out), "--commit", "abc"]) == 0
    assert [row for row in rows_of(out) if row["impl"] == "portable"] == first
    report = json.loads(out.read_text())
    assert report["commit"] == "abc" and report["rows"] == first
    assert "wrong outputs of 4 checked: 0" in capsys.readouterr().out


def test_a_pool_of_fp8_beside_its_bf16(tmp_path):
    out = tmp_path / "verify.json"
    assert bench_verify.main([*COMMAND, "--out", str(out), "--paths", "portable,portable_fp8"]) == 0
    report = json.loads(out.read_text())
    errors = {impl: [r["error"] for r in report["rows"] if r["impl"] == impl] for impl in ("portable", "portable_fp8")}
    assert len(errors["portable_fp8"]) == 4 and max(errors["portable_fp8"]) < 5e-3, "against the rounded keys"
    assert any("portable_fp8 / portable" in gate["gate"] for gate in report["gates"])


def test_a_spent_budget_stops_and_the_next_run_goes_on(tmp_path, capsys):
    out = tmp_path / "verify.json"
    assert bench_verify.main([*COMMAND, "--out", str(out), "--budget-s", "0"]) == 3
    assert json.loads(out.read_text())["rows"] == []
    assert "stopped before measurement 1 of 4" in capsys.readouterr().out
    assert bench_verify.main([*COMMAND, "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 4


def test_a_peer_that_is_not_here_fails_in_its_row_only(tmp_path):
    out = tmp_path / "verify.json"
    command = ["--device", "cpu", "--peers", "flashmla", "--pool", "1000", "--no-plots", "--shapes", "1,2,3,20"]
    assert bench_verify.main([*command, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert ["failed" in row for row in rows if row["impl"] == "flashmla"] == [True]
    assert all("us" in row for row in rows if row["impl"] == "portable")


@pytest.mark.parametrize("option", [["--stages", "speed"], ["--peers", "fa9"], ["--paths", "fast"]])
def test_an_unknown_name_is_refused_with_those_known(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_verify.main([*COMMAND, "--out", str(tmp_path / "verify.json"), *option])
    assert stop.value.code == 2
    assert "there are" in capsys.readouterr().err
