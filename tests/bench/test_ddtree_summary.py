# SPDX-License-Identifier: Apache-2.0
"""Composed tokens a second, goals and tables on rows made up to meet them, to miss them, or to be incomplete."""

from __future__ import annotations

import json
from typing import Any

import bench_ddtree
import pytest
from bench.ddtree import show
from bench.ddtree.modes import CHAIN, NONE, WIDTHS, Mode, adaptive, tree
from bench.ddtree.speed import CELLS, Cell
from bench.ddtree.summary import Rows, accepted, cells, gates

TREES = [tree(width) for width in WIDTHS]
[ADAPTIVE] = adaptive(WIDTHS)
STEP = "step, tree of 16 / chain, worst cell"


def acceptance(mode: Mode, tokens: list[int], temperature: float) -> dict[str, Any]:
    steps = [100] * len(tokens)
    return {"stage": "acceptance", "mode": mode.algorithm, "n": mode.width, "temperature": temperature,
            "tokens": tokens, "steps": steps, "tokens_per_step": sum(tokens) / sum(steps),
            "reached": [0.8, 0.5]}  # fmt: skip


def step(mode: Mode, cell: Cell, ms: float, number: int = 1) -> dict[str, Any]:
    stages = {"draft": 0.5, "verify": ms - 0.5} if mode.algorithm == "ddtree" else {}
    return {"stage": "speed", "mode": mode.algorithm, "n": mode.width, **cell._asdict(), "round": number,
            "step_ms": ms, "stages_ms": stages, "nodes": 20.0 if mode.adapts else None}  # fmt: skip


def made(tree_tokens: float = 1.2, tree_ms: float = 1.1, rounds: int = 3) -> list[dict[str, Any]]:
    """Chain: 3 tokens in 2 ms at every cell; trees by their factors over it; no speculation: 1.5 ms."""
    chain = [290, 300, 310]
    rows = [acceptance(CHAIN, chain, t) for t in (0.0, 1.0)]
    rows += [acceptance(mode, [int(tree_tokens * x) for x in chain], t) for mode in TREES for t in (0.0, 1.0)]
    for number in range(1, rounds + 1):
        for cell in CELLS:
            rows += [step(CHAIN, cell, 2.0, number), step(NONE, cell, 1.5, number)]
            rows += [step(mode, cell, 2.0 * tree_ms, number) for mode in [*TREES, ADAPTIVE]]
    return rows


def at(rows: list[dict[str, Any]], mode: Mode, cell: Cell, **changed: Any) -> list[dict[str, Any]]:
    """The rows, those of a server at a cell changed."""
    mine = (mode.algorithm, mode.width, cell.context, cell.bs)
    return [row | changed if (row["mode"], row["n"], row.get("context"), row.get("bs")) == mine else row
            for row in rows]  # fmt: skip


def judged(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {gate["gate"]: gate["met"] for gate in gates(Rows(rows), WIDTHS)}


def test_tokens_a_second_are_batch_times_acceptance_over_the_step():
    rows, cell = Rows(made()), Cell(1024, 4)
    assert rows.tokens_a_second(CHAIN, cell) == pytest.approx(4 * 3.0 / 2e-3)
    assert rows.tokens_a_second(tree(32), cell) == pytest.approx(4 * 3.6 / 2.2e-3)
    assert rows.tokens_a_second(NONE, cell) == pytest.approx(4 / 1.5e-3)
    assert Rows(made()[2:]).tokens_a_second(CHAIN, cell) is None, "its acceptance is missing"


def test_goals_met():
    met = judged(made())
    assert len(met) == 2 * len(WIDTHS) + 2 * len(CELLS) + 1 and set(met.values()) == {True}


def test_a_tree_that_accepts_no_more_than_the_chain_is_worth_nothing_past_the_block():
    met = judged(made(tree_tokens=1.0))
    assert not met["tokens a step, tree of 16 / chain of 8, temperature 0"]
    assert met["tokens a step, tree of 8 / chain of 8, temperature 0"]
    assert not met["composed tokens/s at 65536 tokens, batch 8, best tree / chain"]


def test_a_tree_below_the_chain_at_its_own_width_is_wrong():
    assert not judged(made(tree_tokens=0.9))["tokens a step, tree of 8 / chain of 8, temperature 1"]


@pytest.mark.parametrize(("factor", "met"), [(1.14, True), (1.16, False)])
def test_one_slow_cell_breaks_the_limit_on_the_step(factor, met):
    assert judged(at(made(), tree(16), CELLS[4], step_ms=2 * factor))[STEP] is met


def test_a_host_that_slows_down_between_rounds_changes_no_ratio():
    """Round 2 is half as fast, and one server has no part in round 3: medians of times would be of different rounds."""
    rows = [row | {"step_ms": 1.5 * row["step_ms"]} if row.get("round") == 2 else row for row in made()]
    rows = [row for row in rows if (row["n"], row.get("round")) != (16, 3)]
    rows += [step(tree(16), cell, 3.3, number) for cell in CELLS for number in (4, 5)]
    rows += [step(CHAIN, cell, 3.0, number) for cell in CELLS for number in (4, 5)]
    times, over = Rows(rows).speed(tree(16), CELLS[0]), Rows(rows).step_over(tree(16), CHAIN, CELLS[0])
    assert times["step_ms"] == pytest.approx(3.3) and times["rounds"] == 4
    assert over.ratio == pytest.approx(1.1) and over.rounds == 4
    assert judged(rows)[STEP]


def test_a_few_rounds_show_where_it_goes_but_settle_nothing():
    by_name = {gate["gate"]: gate for gate in gates(Rows(made(tree_ms=3.0, rounds=2)), WIDTHS)}
    gate = by_name[STEP]
    assert (gate["got"], gate["met"], gate["rounds"]) == (3.0, None, 2) and "known in 0 of 9 cells" in gate["goal"]
    for name in ("best tree / chain", "adaptive / best fixed width"):
        gate = by_name[f"composed tokens/s at 1024 tokens, batch 1, {name}"]
        assert gate["got"] and gate["met"] is None and gate["rounds"] == 2


def test_the_best_width_decides():
    rows = [row for row in made(tree_tokens=1.0, tree_ms=1.5) if row["n"] != 64]
    rows += [acceptance(tree(64), [600, 600, 600], 0.0)]
    rows += [step(tree(64), cell, 3.0, number) for cell in CELLS for number in (1, 2, 3)]
    by_name = {gate["gate"]: gate for gate in gates(Rows(rows), WIDTHS)}
    gate = by_name["composed tokens/s at 1024 tokens, batch 1, best tree / chain"]
    assert gate["met"] and gate["best_width"] == 64 and gate["got"] == pytest.approx(2 / 1.5, rel=1e-3)
    assert gate["over_no_speculation"] == pytest.approx(6 / 3.0 * 1.5, rel=1e-3)


def adaptive_gate(rows: list[dict[str, Any]], cell: Cell) -> dict[str, Any]:
    name = f"composed tokens/s at {cell.context} tokens, batch {cell.bs}, adaptive / best fixed width"
    return {gate["gate"]: gate for gate in gates(Rows(rows), WIDTHS)}[name]


@pytest.mark.parametrize(("ms", "met"), [(2.25, True), (2.29, False)])
def test_an_adaptive_server_is_judged_by_the_best_fixed_width(ms, met):
    cell = CELLS[3]
    rows = at(made(), ADAPTIVE, cell, step_ms=ms, nodes=16.0)
    assert adaptive_gate(rows, cell)["met"] is met
    assert adaptive_gate([row for row in rows if row["mode"] != "adaptive"], cell)["met"] is None
    missing = [row for row in rows if row["stage"] == "acceptance" or row["n"] != 32]
    assert adaptive_gate(missing, cell)["met"] is (None if met else False)
    faster = at(rows, tree(32), cell, step_ms=2.0)
    assert adaptive_gate(faster, cell)["best_width"] == 32 and not adaptive_gate(faster, cell)["met"]


def test_between_two_widths_an_adaptive_server_accepts_what_lies_between():
    rows = [row for row in made() if (row["stage"], row["n"]) != ("acceptance", 32)]
    rows.append(acceptance(tree(32), [460, 460, 460], 0.0))
    assert Rows(rows).tokens_a_second(ADAPTIVE, CELLS[0]) == pytest.approx((3.6 + 1.0 / 4) / 2.2e-3)
    none = [{**row, "nodes": None} if row["mode"] == "adaptive" else row for row in rows]
    assert Rows(none).tokens_a_second(ADAPTIVE, CELLS[0]) is None


def test_missing_and_failed_measurements_leave_goals_open():
    assert set(judged([]).values()) == {None}
    rows = [row for row in made(tree_ms=2.0) if (row["mode"], row["n"]) != ("ddtree", 64)]
    assert judged(rows)["composed tokens/s at 1024 tokens, batch 1, best tree / chain"] is None
    failed = [{**row, "failed": "NaN"} if row["n"] == 16 else row for row in made()]
    met = judged(failed)
    assert met[STEP] is None and met["tokens a step, tree of 16 / chain of 8, temperature 0"] is None
    assert met["tokens a step, tree of 32 / chain of 8, temperature 0"] is True


def test_sections_say_how_far_from_the_chain():
    rows, modes = Rows(made()), [NONE, CHAIN, *TREES]
    table = {(row["temperature"], row["mode"]): row for row in accepted(rows, modes)}
    assert "over_chain" not in table[0.0, "dflash-8"] and table[1.0, "ddtree-64"]["over_chain"] == pytest.approx(1.2)
    speeds = [row for row in cells(rows, modes) if row["mode"] == "ddtree-16"]
    assert len(speeds) == len(CELLS) and {row["step_over_chain"] for row in speeds} == {1.1}
    assert {row["tokens_over_chain"] for row in speeds} == {1.091} and {row["rounds"] for row in speeds} == {3}
    assert "step_over_chain" not in next(row for row in cells(rows, modes) if row["mode"] == "dflash-8")


@pytest.fixture
def report(tmp_path):
    rows = made()
    content = {"card": "a card", "commit": "abc", "gates": list(gates(Rows(rows), WIDTHS)), "rows": rows}
    path = tmp_path / "ddtree.json"
    path.write_text(json.dumps(content))
    return path


def test_the_tables_can_be_made_again_from_the_report(report, capsys):
    assert bench_ddtree.main(["--plot", str(report)]) == 0
    text = report.with_suffix(".md").read_text()
    assert "| 0 | ddtree-16 | 3.600 | 1.200 ± 0.000 | 0.80 0.50 |" in text
    assert "| 65536 | 8 | 1.50 (5333) | 2.00 (12000) |" in text
    assert "| 2.20 (13091), 20 nodes | 3 |" in text
    assert "| 65536 | 8 | 0.750 (0.444) | 1.100 (1.091) |" in text
    assert "| 1024 | 1 | ddtree-8 | 0.50 | 1.70 |" in text
    assert "met  step, tree of 16 / chain, worst cell: 1.1 (goal <= 1.15, rounds: 3)" in capsys.readouterr().out


def test_a_report_without_rounds_is_left_as_it_is(report, capsys):
    content = json.loads(report.read_text())
    for row in content["rows"]:
        row.pop("round", None)
    report.write_text(json.dumps(content))
    assert bench_ddtree.main(["--plot", str(report)]) == 1
    assert "measure again" in capsys.readouterr().out and not report.with_suffix(".md").exists()


def test_the_picture_is_drawn(report):
    pytest.importorskip("matplotlib")
    target = report.with_suffix(".png")
    assert show.draw(json.loads(report.read_text()), target) == target
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", [["--stages", "fast"], ["--widths", "4"], ["--widths", "wide"], ["--plot", "x"]])
def test_what_makes_no_sense_is_refused(option, tmp_path):
    with pytest.raises(SystemExit) as stop:
        bench_ddtree.main(["--out", str(tmp_path / "ddtree.json"), *option])
    assert stop.value.code == 2
