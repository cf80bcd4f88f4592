# SPDX-License-Identifier: Apache-2.0
"""The fuzz of verify steps, dry: what it draws, that it resumes, and that it fails where a kernel would be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fuzz_verify as fuzz
import pytest
import torch
from treeverify.attention import abi, paths, plan, reference

TARGETS = {dtype: [abi.PATH_PORTABLE] for dtype in fuzz.TOLERANCE}
MANY = [fuzz.draw(3, number, TARGETS) for number in range(3000)]


def test_the_same_seed_draws_the_same() -> None:
    assert [fuzz.draw(3, number, TARGETS) for number in range(20)] == MANY[:20]
    assert [fuzz.draw(4, number, TARGETS) for number in range(20)] != MANY[:20]


def test_cases_are_of_every_kind_and_bounded() -> None:
    assert {drawn.n for drawn in MANY} >= set(fuzz.WIDTHS) and {drawn.heads for drawn in MANY} >= set(fuzz.HEADS)
    assert {len(drawn.prefixes) for drawn in MANY} >= {1, 2, 3, 4, 5, 8, 16, 32}
    assert max(max(drawn.prefixes) for drawn in MANY) > 30_000
    kinds = {(drawn.how["two_source"], drawn.how["mask_kind"], drawn.how["plan"]) for drawn in MANY}
    assert len(kinds) == 2 * 4 * 2
    assert {drawn.how.get("taper") for drawn in MANY} >= {None, *range(plan.MAX_TAPER + 1)}
    assert {drawn.how.get("kv_dtype", drawn.how["dtype"]) for drawn in MANY} == set(fuzz.TOLERANCE)
    for drawn in MANY:
        positions = sum(drawn.prefixes) + len(drawn.prefixes) * drawn.n
        assert drawn.n * drawn.heads * positions <= fuzz.WORK and positions <= fuzz.POSITIONS


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small cases, in one thread: others may use the cores."""
    monkeypatch.setattr(fuzz, "WORK", 20_000)
    monkeypatch.setattr(fuzz, "POSITIONS", 500)
    monkeypatch.setattr(fuzz, "PARTIALS", 1 << 16)
    monkeypatch.setattr(fuzz, "BATCH", 5)
    monkeypatch.setattr(fuzz, "CONTROLS", 2)
    monkeypatch.setattr(fuzz, "WIDTHS", (1, 2, 9, 17))
    monkeypatch.setattr(fuzz, "HEADS", (1, 2, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_dry_run_resumes_with_its_seed(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "fuzz.json"), "--device", "cpu", "--cases", "12"]
    assert fuzz.main([*words, "--budget-s", "0"]) == fuzz.OUT_OF_TIME
    assert fuzz.main([*words, "--seed", "5"]) == 0
    report = json.loads((tmp_path / "fuzz.json").read_text())
    assert (report["cases"], report["failed"], report["seed"]) == (12, 0, 5)
    assert sum(row["cases"] for row in report["rows"]) == 12 and {row["path"] for row in report["rows"]} == {"portable"}
    before = (tmp_path / "fuzz.jsonl").read_text()
    assert fuzz.main(words) == 0 and (tmp_path / "fuzz.jsonl").read_text() == before
    assert "seed 5, 2 dropped masks found" in capsys.readouterr().out


def test_a_wrong_output_fails_and_says_how_to_see_it_again(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expectation that is off in one row."""
    honest = fuzz.cases.Case.expected

    def off(case: fuzz.cases.Case) -> torch.Tensor:
        expected = honest(case)
        if case.mask_kind != abi.MASK_NONE:
            expected[0] += 1
        return expected

    monkeypatch.setattr(fuzz.cases.Case, "expected", off)
    assert fuzz.main(["--out", str(tmp_path / "f.json"), "--device", "cpu", "--cases", "5", "--seed", "5"]) == 1
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "f.json").read_text())
    number = report["failures"][0]["case"]
    assert f"--seed 5 --only {number}" in said and report["failed"] == len(report["failures"]) > 0
    monkeypatch.setattr(fuzz.cases.Case, "expected", honest)
    assert fuzz.main(["--out", str(tmp_path / "g.json"), "--device", "cpu", "--seed", "5", "--only", str(number)]) == 0
    assert not (tmp_path / "g.json").exists()


def test_a_check_that_misses_a_dropped_mask_stops_it(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "worst_row_error", lambda out, expected: 0.0)
    with pytest.raises(AssertionError, match="a dropped mask is off by 0"):
        fuzz.main(["--out", str(tmp_path / "f.json"), "--device", "cpu", "--cases", "5", "--seed", "5"])


def test_dry_runs_take_the_path_of_the_cpu() -> None:
    assert [target.path for target in paths.testable(torch.device("cpu"))] == [abi.PATH_PORTABLE]
