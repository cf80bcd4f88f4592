# SPDX-License-Identifier: Apache-2.0
"""The goals judged on rows made up to meet them, to miss them, or to be incomplete; roofline and growth arithmetic."""

from __future__ import annotations

import math

import pytest
from bench import gates, roofline
from bench.shapes import BASELINES, GROWTH, RAGGED, Shape

CEILINGS = {"read_gbs": 4000.0, "matmul_tflops": 800.0, "mma_tflops": 600.0}
ALL = {"portable": 100 << 20, "hopper": 100 << 20}


def row(impl: str, shape: Shape, us: float, **more: object) -> dict[str, object]:
    slots = "paged" if impl == "flashmla" else "random"
    return {"impl": impl, **shape._asdict(), "slots": slots, "batch": "even", "pool": None, "us": us, **more}


def judged(rows: list[dict[str, object]], largest: dict[str, int] = ALL) -> dict[str, bool | None]:
    return {gate["gate"]: gate["met"] for gate in gates.gates(rows, gates.finder(rows), largest)}


def test_reading_binds_where_few_rows_share_the_kv():
    step = roofline.work(kv_tokens=1_000_000, query_rows=8, pairs=8_000_000)
    assert step.bytes == 2 * (1_000_000 * 576 + 8 * 1088)
    assert step.flops == 2 * 8_000_000 * 1088
    assert roofline.bound_us(step, CEILINGS, "matmul_tflops") == pytest.approx(step.bytes / 4e12 * 1e6)


def test_products_bind_where_many_rows_share_it():
    step = roofline.work(kv_tokens=1_000_000, query_rows=1000, pairs=10**9)
    assert roofline.bound_us(step, CEILINGS, "mma_tflops") == pytest.approx(2 * 10**9 * 1088 / 600e12 * 1e6)
    assert roofline.bound_us(step, CEILINGS, "matmul_tflops") == pytest.approx(2 * 10**9 * 1088 / 800e12 * 1e6)


def test_geometric_mean():
    assert gates.geomean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(gates.geomean([]))


@pytest.mark.parametrize(("ours", "mean", "worst"), [(59, True, True), (61, False, True), (81, False, False)])
def test_portable_is_held_to_fa2(ours, mean, worst):
    rows = [row("portable", shape, ours) for shape in BASELINES] + [row("fa2", shape, 100) for shape in BASELINES]
    met = judged(rows)
    assert met["portable / fa2, geometric mean of the baselines"] is mean
    assert met["portable / fa2, worst baseline"] is worst


@pytest.mark.parametrize(("fp8", "gain", "cost"), [(70, True, True), (72, False, True), (121, False, False)])
def test_fp8_is_held_to_bf16_of_the_same_path(fp8, gain, cost):
    few, many = Shape(1, 8, 4, 128_000), BASELINES[3]
    rows = [row("portable", shape, 100) for shape in (few, many, BASELINES[0])]
    rows += [row("portable_fp8", shape, fp8) for shape in (few, many)]
    met = judged(rows, ALL | {"portable_fp8": 100 << 20})
    assert met["portable / portable_fp8, lowest of 1 shapes of few rows, long context"] is gain
    assert met["portable_fp8 / portable, worst of 1 other shapes"] is cost


def test_one_slow_shape_breaks_the_worst_not_the_mean():
    rows = [row("fa2", shape, 100) for shape in BASELINES]
    rows += [row("portable", shape, 90 if i == 0 else 40) for i, shape in enumerate(BASELINES)]
    met = judged(rows)
    assert met["portable / fa2, geometric mean of the baselines"] is True
    assert met["portable / fa2, worst baseline"] is False


def test_hopper_is_held_to_flashmla_and_the_cascade():
    rows = [row(impl, shape, us) for impl, us in (("flashmla", 100), ("fa3_cascade", 200)) for shape in BASELINES]
    fast = judged(rows + [row("hopper", shape, 70) for shape in BASELINES])
    slow = judged(rows + [row("hopper", shape, 111) for shape in BASELINES])
    for name in ("hopper / FlashMLA, worst baseline", "hopper / FlashMLA, geometric mean at 8 heads",
                 "hopper / FA3 cascade, geometric mean of the baselines"):  # fmt: skip
        assert fast[name] is True and slow[name] is False, name


def test_a_missing_measurement_leaves_a_goal_open():
    rows = [row("portable", shape, 10) for shape in BASELINES] + [row("fa2", shape, 100) for shape in BASELINES[1:]]
    assert judged(rows)["portable / fa2, worst baseline"] is None
    assert judged([])["hopper / FlashMLA, worst baseline"] is None


def test_the_roofline_counts_where_batches_are_long():
    long = [shape for shape in BASELINES if shape.bs * shape.kv >= 200_000]
    short = [shape for shape in BASELINES if shape not in long]
    name = "portable: roofline, lowest baseline of >= 200000 KV tokens"
    rows = [row("portable", shape, 1, roofline=0.1) for shape in short]
    assert len(long) == 3 and judged(rows)[name] is None
    assert judged(rows + [row("portable", shape, 1, roofline=0.5) for shape in long])[name] is True
    last = [row("portable", shape, 1, roofline=0.49 if i == 2 else 0.9) for i, shape in enumerate(long)]
    assert judged(rows + last)[name] is False


def test_a_planned_ragged_batch_is_held_to_its_longest_member():
    uneven = Shape(len(RAGGED), 8, 9, max(RAGGED))
    name = "hopper: ragged, planned batch / its longest member alone, 8 heads"
    for us, met in ((114, True), (116, False)):
        rows = [row("hopper", uneven._replace(bs=1), 100), row("hopper", uneven, us) | {"batch": "ragged, planned"}]
        assert judged(rows)[name] is met


def test_memory_is_held_to_its_limits():
    shape = Shape(8, 64, 9, 32768)
    name = "hopper: MiB of workspace at batch 8, 64 heads, n 9"
    assert judged([row("hopper", shape, 1, workspace_bytes=64 << 20)])[name] is True
    assert judged([row("hopper", shape, 1, workspace_bytes=(64 << 20) + (1 << 18))])[name] is False
    every = "hopper: MiB of workspace, largest of all buckets"
    assert judged([], {"hopper": 256 << 20})[every] is True
    assert judged([], {"hopper": 257 << 20})[every] is False


def test_a_wrong_output_is_told():
    shape = BASELINES[0]
    assert judged([row("hopper", shape, 1, error=2e-3)])["hopper: wrong outputs of 1 checked"] is True
    assert judged([row("hopper", shape, 1, error=0.5, wrong=True)])["hopper: wrong outputs of 1 checked"] is False


def test_growth_past_a_floor_is_no_bend_and_a_step_is():
    assert gates.bend([(x, 10 + 3 * x) for x in (1, 2, 4, 8)]) < 0
    assert gates.bend([(x, 3.0 * x) for x in (1, 2, 4, 8)]) == pytest.approx(0)
    assert gates.bend([(1, 1.0), (2, 2.0), (4, 8.0)]) == pytest.approx(1.0)


def test_growth_is_read_off_the_rows():
    rows = [row("portable", shape, 5 + shape.kv / 1000) for shape in GROWTH["kv"]]
    (line,) = gates.growth(gates.finder(rows), ["portable"])
    assert line["axis"] == "kv" and len(line["points"]) == len(GROWTH["kv"]) and line["bend"] < 0


def test_means_and_table_hold_what_both_have():
    rows = [row("portable", shape, 50, roofline=0.6) for shape in BASELINES] + [row("fa2", BASELINES[1], 200)]
    find = gates.finder(rows)
    assert gates.means(find, ["portable"], ["fa2", "fa3"]) == [
        {"path": "portable", "peer": "fa2", "shapes": 1, "mean": 0.25}
    ]
    table = gates.table(find, ["portable"], ["fa2"])
    assert [line.get("portable/fa2") for line in table] == [None, 0.25, None, None, None, None]
    printed = gates.table_text(table, ["portable", "fa2"]).splitlines()
    assert printed[2].split() == ["1", "8", "9", "32768", "50.0", "60%", "200.0"]
    assert printed[3].split()[-1] == "-"


def test_the_text_names_every_gate():
    rows = [row("portable", shape, 10) for shape in BASELINES]
    result = list(gates.gates(rows, gates.finder(rows), ALL))
    text = gates.text(result)
    assert len(text.splitlines()) == len(result)
    assert all(gate["gate"] in text for gate in result)
