# SPDX-License-Identifier: Apache-2.0
"""The drafting head's kernels, their own code on an emulated block (emulator/machine.h says what is real).

For machines without a GPU, against the CPU form of the ops. What it can't see, tests/gpu does.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import head_cases
import pytest
import torch
from treeverify.ddtree import head_ops

HALF_OF_THE_THREADS = 2
"""The merging block has 256 threads here, and room for as many fewer candidates."""


@pytest.fixture(scope="session")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return emulator_build("head")


Emulate = Callable[..., None]


@pytest.fixture
def emulate(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """emulate("lists" or "merge", *args, order=0) runs an op on the emulated device; `order` seeds the warps' order."""

    def emulate(op: str, *args: torch.Tensor | int, order: int = 0) -> None:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            entry = getattr(library, f"tv_emulate_{what.removeprefix('topk_')}")
            entry.restype = ctypes.c_char_p
            error = entry(ctypes.byref(params), ctypes.c_uint64(order))
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(head_ops, "launch", launch)
        getattr(head_ops, f"_{op}_cuda")(*args)

    return emulate


def draw_size(draw: random.Random) -> tuple[int, int]:
    """Vocabulary and k: whole slices, the ends of vectors, more candidates than threads have logits."""
    vocab = draw.choice([1, 9, 255, 2048, 8191, 8192, 8200, 12_345, 16_384, draw.randint(1, 20_000)])
    return vocab, draw.choice([1, 2, 15, 63, 255, draw.randint(1, 255)])


@pytest.mark.parametrize("kind", head_cases.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_lists(emulate, kind, seed):
    draw = random.Random(f"{kind} {seed}")
    vocab, k = draw_size(draw)
    x = head_cases.logits(kind, 2, vocab, draw.choice(head_cases.DTYPES), seed)
    # Rows of a wider tensor, at any alignment, the last row at the end of the memory
    shift, gap = draw.choice([0, 8, 1, 3]), draw.choice([0, 16, 5])
    memory = torch.full((shift + 2 * vocab + gap,), torch.nan, dtype=x.dtype)
    placed = memory[shift:].as_strided((2, vocab), (vocab + gap, 1))
    placed.copy_(x)
    spare = draw.choice([0, 1])  # empty lists, at the end and between the rows
    expected, found = (head_cases.empty_lists(2, head_ops.list_count(vocab) + spare + 1, k) for _ in range(2))
    head_ops.topk_lists(x, 1000, expected[:, :-1])
    emulate("lists", placed, 1000, found[:, :-1], order=seed)
    head_cases.check_lists(found[:, :-1], expected[:, :-1])
    assert torch.equal(found[:, -1], expected[:, -1]), "written past the lists"


@pytest.mark.parametrize("kind", head_cases.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_merge(emulate, kind, seed):
    """Lists of several ranks: made here from columns that are dealt out, so that ties meet across lists."""
    draw = random.Random(f"{kind} {seed}")
    ranks, count, k = draw.randint(1, 3), draw.randint(1, 6), draw.choice([1, 2, 15, 63, 255])
    vocab = draw.choice([1, 7, 200, 8_000])
    x = head_cases.logits(kind, 3, vocab, torch.float32, seed)
    lists = torch.zeros(ranks, 3, count, k + 1, dtype=torch.int64)
    for i in range(min(ranks * count, vocab)):
        begin, end = vocab * i // (ranks * count), vocab * (i + 1) // (ranks * count)
        if begin < end:
            head_ops.topk_lists(x[:, begin:end].contiguous(), begin, lists[i % ranks, :, i // ranks : i // ranks + 1])
    assert ranks * count * k <= head_ops.MAX_MERGED // HALF_OF_THE_THREADS
    expected, found = head_cases.empty_result(3, k), head_cases.empty_result(3, k)
    head_ops.topk_merge(lists, *expected)
    emulate("merge", lists, *found, order=seed)
    assert torch.equal(found[0], expected[0])
    head_cases.check_logprobs(found[1], expected[1], x)


def test_the_order_of_the_warps_changes_no_bit(emulate):
    x = head_cases.logits("ties", 2, 10_000, torch.bfloat16, seed=1)
    results = []
    for order in range(3):
        lists, result = head_cases.empty_lists(2, 2, 63), head_cases.empty_result(2, 63)
        emulate("lists", x, 0, lists, order=order)
        emulate("merge", lists[None], *result, order=order)
        results.append((lists, *result))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_ids_that_repeat_are_merged_in_bounds(emulate):
    """Ranks that name the same tokens, which no vocabulary's shards do: more equal candidates than a block can rank."""
    lists = head_cases.empty_lists(1, 1, 255)
    head_ops.topk_lists(torch.zeros(1, 255), 0, lists)
    same = torch.full((4, 1, 1, 256), int(lists[0, 0, 0]))
    same[..., -1] = lists[0, 0, -1]
    found, twice = head_cases.empty_result(1, 255), head_cases.empty_result(1, 255)
    emulate("merge", same, *found, order=0)
    assert found[0].eq(0).all() and found[1].isfinite().all()
    emulate("merge", torch.stack([lists, lists]), *twice, order=0)
    assert twice[0][0].tolist() == [i // 2 for i in range(255)]
