# SPDX-License-Identifier: Apache-2.0
"""kv_move on the GPU against plain copies, bit for bit: every kind of move, guards around the buffers, replays."""

from __future__ import annotations

import random

import pytest
import torch
from kv_cases import Case, apart, case, paths, rings
from treeverify.kv import ops
from waits import no_synchronisation

pytestmark = pytest.mark.gpu
LATENT, HALF, KEYS = 1152, 576, 2048  # bytes of a row: MLA in bf16, in fp8; eight heads of 128


def check(one: Case) -> None:
    expected, args = one.expected(), one.args()
    with no_synchronisation():
        ops.kv_move(*args)
    assert all(torch.equal(found, due) for found, due in zip(one.memory, expected, strict=True))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_random_moves(seed, index):
    draw = random.Random(seed)
    widths = draw.choice([[LATENT] * 61, [LATENT, HALF, KEYS, KEYS, 16], [KEYS] * 10])
    group, requests = draw.choice([1, 7, 15, 63, 255]), draw.choice([1, 3, 8])
    kinds = [
        (paths(draw, requests, 256, group, 4096), group), (rings(draw, requests, group, 4096), group),
        (apart(draw, 1500, 4096), 0),
    ]  # fmt: skip
    for moves, size in kinds:
        check(case(seed, widths, 4096, moves, group=size, index=index, device="cuda"))


@pytest.mark.parametrize("width", [16, 48, HALF, LATENT, KEYS, 32768, 32784, 80000])
def test_rows_of_any_length(width):
    moves = apart(random.Random(width), 300, 1000)
    check(case(width, [width, 16], 1000, moves, group=0, device="cuda"))


@pytest.mark.parametrize("group", [2, 16, 100, 256])
def test_rows_that_take_each_others_place(group):
    """Many times over: a row that is written too early shows sooner or later."""
    for seed in range(20):
        moves = rings(random.Random(seed), 8, group, 4096)
        check(case(seed, [LATENT] * 8, 4096, moves, group=group, device="cuda"))


def test_more_tiles_than_blocks():
    check(case(0, [LATENT] * 400, 6000, apart(random.Random(0), 3000, 6000), group=0, device="cuda"))


def test_slots_outside_move_nothing():
    far = 1 << 40
    moves = [(-1, 2), (3, -1), (50, 4), (5, 50), (far, 6), (7, far), (-far, 8), (9, 10)]
    check(case(0, [LATENT], 50, moves, group=0, device="cuda"))


def test_rows_past_four_gigabytes():
    """Offsets of 64 bits: 4.8 GiB of rows, moved to and from the far end."""
    slots, generator = 4_500_000, torch.Generator().manual_seed(0)
    pool = torch.zeros(slots, LATENT, dtype=torch.uint8, device="cuda")
    rows = torch.randint(256, (2, LATENT), dtype=torch.uint8, generator=generator).cuda()
    pool[7], pool[slots - 1] = rows
    from treeverify.kv.pools import Buffers

    to = Buffers.of([pool])
    src, dst = torch.tensor([[7, slots - 1], [slots - 2, 3]], device="cuda")
    ops.kv_move(to.bases, to.row_bytes, to.longest, to.slots, src, dst, None, 0)
    assert torch.equal(pool[slots - 2], rows[0]) and torch.equal(pool[3], rows[1])
    assert int((pool[4:7] != 0).sum()) == 0 and int((pool[8 : slots - 2] != 0).sum()) == 0


@pytest.mark.parametrize("group", [0, 15])
def test_replays_follow_the_count_and_the_lists(group):
    """One graph; slots, their number and the rows change between replays, and are poisoned before."""
    capacity, slots = 8 * 15, 2000
    one = case(0, [LATENT] * 6 + [KEYS] * 4, slots, [(0, 0)] * capacity, group=group, count=0, device="cuda")
    args = one.args()
    ops.kv_move(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.kv_move(*args)
    assert one.count is not None
    for seed, requests in enumerate([8, 3, 0, 1, 8, 5]):
        draw = random.Random(seed)
        moves = apart(draw, 15 * requests, slots) if group == 0 else paths(draw, requests, 40, group, slots)
        garbage = [(draw.randrange(slots), draw.randrange(slots)) for _ in range(capacity - len(moves))]
        listed = torch.tensor(moves + garbage).T.cuda()  # behind the count: must not be looked at
        one.src.copy_(listed[0])
        one.dst.copy_(listed[1])
        one.count.fill_(len(moves))
        for memory in one.memory:
            memory.random_(0, 256)
        for _ in range(2):
            expected = one.expected()
            with no_synchronisation():
                graph.replay()
            assert all(torch.equal(found, due) for found, due in zip(one.memory, expected, strict=True))


def test_all_layers_of_sglang_like_pools_in_one_launch():
    case_ = case(0, [LATENT] * 61 + [KEYS] * 10, 3000, apart(random.Random(0), 1000, 3000), group=0, device="cuda")
    args = case_.args()
    ops.kv_move(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        ops.kv_move(*args)
        torch.cuda.synchronize()
    kernels = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["tv_kv_move_rows"], kernels
