# SPDX-License-Identifier: Apache-2.0
"""topk_lists and topk_merge on the GPU against their CPU form, and in a CUDA graph; what they cost."""

from __future__ import annotations

import head_cases
import pytest
import torch
from bench.timer import GraphTimer
from treeverify.ddtree import head_ops
from treeverify.ddtree.head_abi import MAX_MERGED
from waits import no_synchronisation

pytestmark = pytest.mark.gpu

SHAPES = [
    (7, 163_840, 15),
    (56, 163_840, 63),
    (2, 262_144, 255),
    (5, 129_280, 15),
    (3, 100_003, 31),
    (300, 8_193, 7),
    (512, 32_768, 3),
    (4, 9, 9),
    (1, 1, 1),
    (3, 5, 12),
]
"""Rows, vocabulary, k."""


def check(x: torch.Tensor, k: int) -> None:
    """Both ops on the GPU against the CPU, from poisoned buffers."""
    rows, count = x.shape[0], head_ops.list_count(x.shape[1])
    found, expected = (head_cases.empty_lists(rows, count, k, device) for device in ("cuda", "cpu"))
    head_ops.topk_lists(x, 3, found)
    head_ops.topk_lists(x.cpu(), 3, expected)
    head_cases.check_lists(found.cpu(), expected)
    merged, wanted = head_cases.empty_result(rows, k, "cuda"), head_cases.empty_result(rows, k)
    head_ops.topk_merge(found[None], *merged)
    head_ops.topk_merge(expected[None], *wanted)
    assert torch.equal(merged[0].cpu(), wanted[0])
    head_cases.check_logprobs(merged[1].cpu(), wanted[1], x)


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("dtype", head_cases.DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "k"), SHAPES)
def test_shapes(rows, vocab, k, dtype, kind):
    check(head_cases.logits(kind, rows, vocab, dtype, seed=rows).cuda(), k)


@pytest.mark.parametrize("kind", head_cases.KINDS)
@pytest.mark.parametrize("dtype", head_cases.DTYPES)
@pytest.mark.parametrize(("vocab", "k"), [(20_000, 63), (20_000, 255), (8_192, 1), (300, 255)])
def test_hard_logits(vocab, k, dtype, kind):
    check(head_cases.logits(kind, 4, vocab, dtype, seed=k).cuda(), k)


@pytest.mark.parametrize("dtype", head_cases.DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("gap", [0, 3, 16])
def test_rows_anywhere(gap, shift, dtype):
    """Rows with strides and at any alignment, NaN around them; the lists are part of a wider tensor, too."""
    rows, vocab, k = 5, 16_392, 15
    x = head_cases.logits("ties", rows, vocab, dtype, seed=gap)
    memory = torch.full((shift + rows * (vocab + gap),), torch.nan, dtype=dtype, device="cuda")
    placed = memory[shift:].as_strided((rows, vocab), (vocab + gap, 1))
    placed.copy_(x)
    found, expected = head_cases.empty_lists(rows, 5, k, "cuda"), head_cases.empty_lists(rows, 5, k)
    head_ops.topk_lists(placed, 0, found[:, 1:])
    head_ops.topk_lists(x, 0, expected[:, 1:])
    head_cases.check_lists(found[:, 1:].cpu(), expected[:, 1:])
    assert torch.equal(found[:, 0].cpu(), expected[:, 0]), "written past the lists"

    alone = head_cases.empty_lists(1, 5, k, "cuda")
    head_ops.topk_lists(x[2:3].cuda(), 0, alone[:, 1:])
    assert torch.equal(alone[0], found[2]), "a row's bits depend on where it lies"


@pytest.mark.parametrize(("ranks", "count", "k"), [(1, 1, 1), (2, 3, 15), (8, 4, 63), (3, 7, 255), (16, 4, 255)])
def test_merge_of_many_ranks(ranks, count, k):
    assert ranks * count * k <= MAX_MERGED
    vocab, rows = ranks * count * 300, 9
    x = head_cases.logits("ties", rows, vocab, torch.float32, seed=ranks)
    lists = torch.zeros(ranks, rows, count, k + 1, dtype=torch.int64)
    for i in range(ranks * count):
        head_ops.topk_lists(x[:, 300 * i : 300 * i + 300], 300 * i, lists[i % ranks, :, i // ranks : i // ranks + 1])
    found, expected = head_cases.empty_result(rows, k, "cuda"), head_cases.empty_result(rows, k)
    head_ops.topk_merge(lists.cuda(), *found)
    head_ops.topk_merge(lists, *expected)
    assert torch.equal(found[0].cpu(), expected[0])
    head_cases.check_logprobs(found[1].cpu(), expected[1], x)


@pytest.mark.parametrize("dtype", head_cases.DTYPES)
def test_replay_gives_the_bits_of_eager(dtype):
    rows, vocab, k = 14, 163_840, 15
    steps = [head_cases.logits("normal", rows, vocab, dtype, seed).cuda() for seed in range(3)]
    x, lists = torch.empty_like(steps[0]), head_cases.empty_lists(rows, head_ops.list_count(vocab), k, "cuda")
    result = head_cases.empty_result(rows, k, "cuda")

    def step() -> None:
        head_ops.topk_lists(x, 0, lists)
        head_ops.topk_merge(lists[None], *result)

    x.copy_(steps[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for logits in steps:
        x.copy_(logits)
        for t in (lists, *result):
            t.fill_(-7)
        with no_synchronisation():
            graph.replay()
        replayed = [t.clone() for t in (lists, *result)]
        for t in (lists, *result):
            t.fill_(-7)
        step()
        assert all(torch.equal(a, b) for a, b in zip(replayed, (lists, *result), strict=True))
        # And those of each row by itself
        for row in (0, rows - 1):
            alone = head_cases.empty_result(1, k, "cuda")
            head_ops.topk_merge(lists[None, row : row + 1], *alone)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, result, strict=True))


def test_the_first_is_argmax():
    for dtype in head_cases.DTYPES:
        x = head_cases.logits("ties", 56, 163_840, dtype, seed=0).cuda()
        assert torch.equal(head_cases.topk(x, 15)[0][:, 0], x.argmax(1))


@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(7, 163_840, 15), (56, 163_840, 15), (56, 163_840, 63), (120, 32_768, 63)]
)
def test_is_faster_than_sorting(rows, vocab, k, capsys):
    """Against torch.topk and logsumexp, both from a CUDA graph with a cold L2; prints microseconds."""
    x = head_cases.logits("normal", rows, vocab, torch.bfloat16, seed=0).cuda()
    lists = head_cases.empty_lists(rows, head_ops.list_count(vocab), k, "cuda")
    result, timer = head_cases.empty_result(rows, k, "cuda"), GraphTimer()

    def ours() -> None:
        head_ops.topk_lists(x, 0, lists)
        head_ops.topk_merge(lists[None], *result)

    def torchs() -> torch.Tensor:
        return x.topk(k, 1).values.float() - x.float().logsumexp(1, keepdim=True)

    parts = [timer(lambda: head_ops.topk_lists(x, 0, lists)), timer(lambda: head_ops.topk_merge(lists[None], *result))]
    mine, theirs = timer(ours), timer(torchs)
    with capsys.disabled():
        print(f"\n{rows} rows, V {vocab}, k {k}: {mine:.1f} us (lists {parts[0]:.1f}, merge {parts[1]:.1f}), ", end="")
        print(f"torch {theirs:.1f} us; read at 4.8 TB/s {x.nbytes / 4.8e6:.1f} us")
    assert mine < theirs
