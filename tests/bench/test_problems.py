# SPDX-License-Identifier: Apache-2.0
"""The steps the bench draws and how it checks them, on the CPU."""

from __future__ import annotations

import pytest
import torch
from bench.jobs import PLANNED, Job
from bench.measure import Bench, sample, token_reference, visible_pairs
from bench.peers import tree_rows
from bench.problems import PAGE, Problems
from bench.shapes import Shape
from bench.timer import TooSlow
from treeverify.attention import reference


@pytest.fixture(scope="module")
def problems() -> Problems:
    return Problems(3000, "cpu")


@pytest.mark.parametrize("slots", ["random", "contiguous", "paged"])
def test_every_position_has_a_slot_of_its_own(problems, slots):
    case = problems.draw([200, 0, 77], 5, 2, slots=slots)
    assert len(case.kv_indices) == sum(case.kv_lens) == 277 + 15
    assert len(set(case.kv_indices.tolist())) == len(case.kv_indices)
    assert int(case.kv_indices.max()) < problems.pool.shape[0]


def test_a_paged_step_lies_in_the_pages_of_its_table(problems):
    shape = Shape(3, 2, 5, 130)
    case = problems.draw([130] * 3, 5, 2, slots="paged")
    table = problems.page_table(shape)
    for b, slots in enumerate(case.kv_indices.view(3, 135)):
        position = torch.arange(135)
        assert torch.equal(slots, table[b, position // PAGE] * PAGE + (position % PAGE).int())


def test_a_pool_of_given_size_is_not_left(problems):
    case = problems.draw([100], 4, 2, pool_slots=104)
    assert case.pool.shape[0] == 104
    assert sorted(case.kv_indices.tolist()) == list(range(104))


def test_paths_and_peers_get_the_same_queries(problems):
    a, b = problems.draw([70], 4, 2), problems.draw([70], 4, 2, chain=True, slots="contiguous")
    assert torch.equal(a.q_nope, b.q_nope) and torch.equal(a.q_pe, b.q_pe)


def test_tokens_checked_alone_agree_with_the_whole_reference(problems):
    case = problems.draw([200, 0, 77], 5, 2)
    tokens = sample(case)
    assert tokens == [0, 7, 14]
    assert reference.worst_row_error(token_reference(case, tokens), case.expected()[tokens]) < 1e-12


def test_tokens_checked_alone_notice_a_dropped_mask(problems):
    case = problems.draw([20, 20, 20], 7, 2)
    case.visible = reference.causal(7).expand(3, 7, 7)
    every = list(range(21))
    assert reference.worst_row_error(token_reference(case, every), case.run()) > 0.05


def test_pairs_are_prefix_columns_and_visible_nodes(problems):
    case = problems.draw([20, 30], 3, 4, chain=True)
    assert visible_pairs(case) == 4 * (3 * 20 + 3 * 30 + 2 * 6)


def test_tree_rows_list_what_a_node_sees(problems):
    visible = problems.trees(2, 6)
    slots = torch.arange(100, 112, dtype=torch.int32).view(2, 6)
    table, seen = tree_rows(slots, visible)
    for row, (pages, count) in enumerate(zip(table, seen, strict=True)):
        b, i = divmod(row, 6)
        assert pages[:count].tolist() == slots[b][visible[b, i]].tolist()
    assert table.dtype == seen.dtype == torch.int32


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, run: object) -> float:
        raise self.error


def test_a_measurement_names_its_splits_memory_and_error(problems):
    bench = Bench(problems, lambda run: 100.0, {"read_gbs": 4000.0, "mma_tflops": 600.0}, "cpu")
    row = bench(Job("portable", Shape(2, 2, 3, 70)))
    assert row["us"] == 100.0 and 0 < row["error"] < 5e-3 and "wrong" not in row
    assert row["workspace_bytes"] == 4 * row["nsplit"] * 2 * 3 * 2 * 513
    assert row["roofline"] == pytest.approx(row["roofline_us"] / 100, rel=1e-3)


def test_a_planned_ragged_step_runs(problems, monkeypatch):
    monkeypatch.setattr("bench.measure.RAGGED", [400, 3, 5])
    row = Bench(problems, lambda run: 1.0, {}, "cpu")(Job("portable", Shape(3, 2, 3, 400), batch=PLANNED))
    assert row["us"] == 1.0 and row["error"] < 5e-3


def test_what_is_too_slow_or_fails_says_so(problems):
    job = Job("portable", Shape(1, 2, 3, 70))
    assert Bench(problems, Failing(TooSlow("900 ms")), {}, "cpu")(job)["skipped"] == "900 ms"
    assert "lost" in Bench(problems, Failing(RuntimeError("lost")), {}, "cpu")(job)["failed"]


def test_a_wrong_output_is_called_wrong(problems, monkeypatch):
    draw = problems.draw

    def dropped(*args, **kwargs):
        case = draw(*args, **kwargs)
        case.mask_kind, case.mask = 0, None
        return case

    monkeypatch.setattr(problems, "draw", dropped)
    row = Bench(problems, lambda run: 1.0, {}, "cpu")(Job("portable", Shape(1, 2, 9, 12)))
    assert row["wrong"] and row["error"] > 0.05
