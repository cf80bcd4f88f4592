# SPDX-License-Identifier: Apache-2.0
"""The moving kernel's own code on emulated blocks (emulator/machine.h says what is real), against plain copies.

For machines without a GPU. What it can't see, tests/gpu does.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch
from kv_cases import Case, apart, case, paths, rings
from treeverify.kv import ops

LATENT, HALF, KEYS = 1152, 576, 2048  # bytes of a row: MLA in bf16, in fp8; eight heads of 128
Emulate = Callable[..., None]


@pytest.fixture(scope="session")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return emulator_build("kv", cuda=False)


@pytest.fixture
def emulate(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """emulate(case, blocks, order): the op on the emulated device; `order` seeds that of blocks and warps."""

    def emulate(one: Case, blocks: int, order: int) -> None:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            entry = getattr(library, f"tv_emulate_{what}")
            entry.restype = ctypes.c_char_p
            error = entry(ctypes.byref(params), blocks, ctypes.c_uint64(order))
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(ops, "launch", launch)
        ops._move_cuda(*one.args())

    return emulate


def check(emulate: Emulate, one: Case, blocks: int, order: int) -> None:
    expected = one.expected()
    emulate(one, blocks, order)
    assert all(torch.equal(found, due) for found, due in zip(one.memory, expected, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_paths_of_a_verify_step(emulate, seed, index):
    draw = random.Random(seed)
    group, requests, n = draw.choice([1, 3, 7, 15]), draw.randint(1, 5), draw.choice([16, 40])
    moves = paths(draw, requests, n, group, 300)
    one = case(seed, [LATENT, LATENT, KEYS, KEYS], 300, moves, group=group, index=index)
    check(emulate, one, draw.choice([1, 2, 40]), seed)


@pytest.mark.parametrize(("group", "width"), [(2, 16), (16, LATENT), (100, HALF), (255, 48), (256, LATENT)])
def test_rows_that_take_each_others_place(emulate, group, width):
    """A ring has no row that could be written first; 256 rows of 1152 bytes are nine tiles across."""
    one = case(group, [width], 700, rings(random.Random(group), 2, group, 700), group=group)
    check(emulate, one, 3, group)


@pytest.mark.parametrize("width", [16, 48, HALF, LATENT, 32768, 32784, 80000])
def test_rows_of_any_length(emulate, width):
    """From many rows a block to many blocks a row."""
    rows = 20 if width > KEYS else 600
    moves = apart(random.Random(width), rows // 3, rows)
    check(emulate, case(width, [width, 16], rows, moves, group=0), 4, width)


@pytest.mark.parametrize("count", [-3, 0, 1, 28, 29, 70, 1000])
def test_the_count_on_the_device_ends_the_list(emulate, count):
    moves = apart(random.Random(1), 70, 200)
    for group in (0, 7):
        check(emulate, case(count, [LATENT], 200, moves, group=group, count=count), 2, 5)


def test_slots_outside_move_nothing(emulate):
    far = 1 << 40
    moves = [(-1, 2), (3, -1), (50, 4), (5, 50), (far, 6), (7, far), (-far, 8), (9, 10)]
    one = case(0, [LATENT], 50, moves, group=0)
    before = one.memory[0].clone()
    check(emulate, one, 1, 0)
    assert (one.memory[0] != before).any(1).nonzero().flatten().tolist() == [10 + 4], "only the last one"


def test_entries_of_their_own_are_not_read_before_others_are_written(emulate):
    """A ring whose entries are no group: the reference refuses it, and the kernel does get it wrong."""
    one = case(3, [16], 2000, rings(random.Random(3), 1, 1000, 2000), group=0)
    with pytest.raises(ValueError, match="left in one group and entered in another"):
        ops.kv_move(*one.args())
    expected = one.expected()
    emulate(one, 1, 3)
    assert not torch.equal(one.memory[0], expected[0])
