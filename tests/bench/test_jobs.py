# SPDX-License-Identifier: Apache-2.0
"""What is measured, and in which order."""

from __future__ import annotations

import itertools

import pytest
from bench.jobs import STAGES, jobs
from bench.peers import PEERS
from bench.shapes import BASELINES, BS, GROWTH, GROWTH_BASE, HEADS, KV, MORE, N, Shape, sweep

PATHS = ["portable", "hopper"]


def test_the_sweep_is_every_combination_once():
    shapes = sweep()
    assert len(shapes) == len(set(shapes))
    assert set(shapes) == {Shape(*values) for values in itertools.product(BS, HEADS, N, KV)}


def test_the_sweep_soon_spans_every_axis():
    """The first twentieth has both ends of what is served: one request and many, few heads and many, short and long."""
    early = sweep()[: len(sweep()) // 20]
    assert {1, 8, 32} <= {s.bs for s in early} and {8, 64} <= {s.heads for s in early}
    assert {9, 64} <= {s.n for s in early} and {1024, 32768, 200_000} <= {s.kv for s in early}


def test_no_measurement_is_asked_for_twice_within_a_stage():
    for stage in STAGES:
        wanted = list(jobs(stage, PATHS, list(PEERS)))
        assert wanted and len(wanted) == len(set(wanted)), stage


def test_peers_are_timed_beside_both_paths_on_the_baselines():
    first = list(jobs("shapes", PATHS, list(PEERS)))
    for shape in BASELINES:
        timed = {j.impl for j in first if j.shape == shape}
        assert {*PATHS, "fa2", "fa3", "fa3_cascade", "flashmla"} <= timed
    assert {j.shape for j in first if j.impl in PEERS} == set(BASELINES + MORE)


def test_triton_stays_with_what_it_finishes():
    assert max(j.shape.kv for j in jobs("shapes", PATHS, ["triton"]) if j.impl == "triton") == 32768


def test_given_shapes_take_the_place_of_the_usual_ones():
    shape = Shape(1, 2, 3, 70)
    assert {j.shape for j in jobs("shapes", PATHS, ["fa2"], [shape])} == {shape}


def test_growth_moves_one_axis_at_a_time():
    for axis, line in GROWTH.items():
        values = [getattr(shape, axis) for shape in line]
        assert values == sorted(set(values)) and len(values) >= 5
        assert {shape._replace(**{axis: 0}) for shape in line} == {GROWTH_BASE._replace(**{axis: 0})}


def test_both_slot_orders_are_swept():
    orders = {(j.impl, j.slots) for j in jobs("sweep", PATHS, [])}
    assert orders == set(itertools.product(PATHS, ("random", "contiguous")))


@pytest.mark.parametrize("text", ["1,8,9", "1,8,9,0", "1,8,9,1024,5", "a,b,c,d"])
def test_a_text_that_is_no_shape_is_refused(text):
    with pytest.raises(ValueError):
        Shape.parse(text)


def test_a_shape_reads_as_written():
    assert Shape.parse("8,64,9,32768") == Shape(8, 64, 9, 32768)
