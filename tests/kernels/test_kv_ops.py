# SPDX-License-Identifier: Apache-2.0
"""kv_move on the CPU: rows go where they are sent, and what it refuses."""

from __future__ import annotations

import random

import pytest
import torch
from kv_cases import apart, case, paths, rings
from torch._subclasses.fake_tensor import FakeTensorMode
from treeverify.kv import ops, selftest
from treeverify.kv.pools import Buffers, Unmovable


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(10))
def test_rows_go_where_they_are_sent(seed, index):
    draw = random.Random(seed)
    for moves, group in (
        (paths(draw, 4, 30, 7, 200), 7), (rings(draw, 3, 20, 200), 20), (apart(draw, 90, 200), 0),
    ):  # fmt: skip
        one = case(seed, [1152, 16, 2048], 200, moves, group=group, index=index, count=draw.choice([None, 45]))
        if one.count is not None and group == 20:
            one.count = None  # a ring cut in two is no ring
        expected = one.expected()
        ops.kv_move(*one.args())
        assert all(torch.equal(found, due) for found, due in zip(one.memory, expected, strict=True))


@pytest.mark.parametrize(
    ("moves", "group", "message"),
    [
        ([(1, 5), (2, 5)], 2, "two moves enter slot 5"),
        ([(1, 2), (2, 3)], 0, "slot 2 is left in one group and entered in another"),
        ([(1, 2), (7, 7), (2, 3), (8, 8)], 2, "slot 2 is left in one group and entered in another"),
    ],
)
def test_moves_whose_order_would_matter_are_refused(moves, group, message):
    one = case(0, [16], 10, moves, group=group)
    before = one.memory[0].clone()
    with pytest.raises(ValueError, match="treeverify: " + message):
        ops.kv_move(*one.args())
    assert torch.equal(one.memory[0], before)


def test_a_slot_left_twice_or_left_and_entered_in_a_group_is_fine():
    one = case(0, [16], 10, [(1, 2), (2, 3), (1, 4)], group=3)
    expected = one.expected()
    ops.kv_move(*one.args())
    assert torch.equal(one.memory[0], expected[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bases": torch.zeros(1)}, "bases is torch.float32, expected torch.int64"),
        ({"row_bytes": torch.zeros(2).long()}, r"bases is \(1,\) and row_bytes \(2,\), expected \[buffers\] both"),
        ({"src": torch.zeros(3)}, "src is torch.float32, expected int32 or int64"),
        ({"src": torch.zeros(3).int()}, "src is torch.int32 and dst torch.int64, expected the same"),
        ({"src": torch.zeros(4).long()}, r"src is \(4,\) and dst \(3,\), expected \[capacity\] both"),
        ({"src": torch.zeros(6).long()[::2]}, r"src has strides \(2,\), expected contiguous"),
        ({"entries": torch.zeros(1).long()}, "entries is torch.int64, expected torch.int32"),
        ({"entries": torch.zeros(2).int()}, "entries has 2 elements, expected 1"),
        ({"longest": 24}, "rows of up to 24 bytes, expected a multiple of 16"),
        ({"slots": 0}, "0 slots, expected at least 1"),
        ({"group": 257}, "groups of 257 entries are not within 0 .. 256"),
    ],
)
def test_bad_arguments_are_named(change, message):
    args = case(0, [16], 10, [(1, 2), (3, 4), (5, 6)], group=0).args()
    with pytest.raises(ValueError, match="treeverify: " + message):
        ops.kv_move(*args._replace(**change))


def test_buffers_that_cannot_be_moved_in_pieces():
    for tensor in (torch.zeros(4, 3), torch.zeros(4, 8)[:, :4], torch.zeros(40)[1:33].view(4, 8)):
        with pytest.raises(Unmovable, match="pieces of 16 bytes"):
            Buffers.of([tensor])


def test_the_selftest_moves_every_row():
    assert [row["ok"] for row in selftest.rows(0, "cpu")] == [True] * len(selftest.SHAPES)


def test_fakes_trace_without_running():
    with FakeTensorMode():
        longs = torch.zeros(2, dtype=torch.int64)
        assert ops.kv_move(longs, longs, 16, 4, longs, longs, None, 0) is None
