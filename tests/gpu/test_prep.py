# SPDX-License-Identifier: Apache-2.0
"""mla_prep on the GPU against its CPU form, and the whole step without a host synchronisation."""

from __future__ import annotations

import pytest
import torch
from treeverify.attention import abi, cases, ops, paths, reference
from treeverify.attention.plan import KEY_DIM, workspace_floats
from waits import no_synchronisation

pytestmark = pytest.mark.gpu


def buffers(bs: int, n: int, tokens: int, index_dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """kv_indptr, kv_indices, packed mask, all poisoned."""
    return [
        torch.full((bs + 3,), -7, dtype=torch.int32, device=device),
        torch.full((tokens + 5,), -7, dtype=index_dtype, device=device),
        torch.full((bs, n, -(-n // 64)), -7, dtype=torch.int64, device=device),
    ]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seq_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", [abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN])
@pytest.mark.parametrize(
    ("lens", "n", "padded"),
    [([0], 1, 0), ([9, 0, 4], 6, 2), ([5000, 1], 64, 1), ([17, 300, 2], 65, 0), ([3] * 300, 9, 212)],
)
def test_matches_the_cpu(lens, n, padded, kind, seq_dtype, index_dtype):
    real, bs, width = len(lens), len(lens) + padded, max(lens) + n + 3
    table = torch.randperm((real + 2) * width).int().view(real + 2, width)
    rows = torch.cat([torch.randperm(real + 2)[:real], torch.full((padded,), 2**40)])
    trees = cases.random_trees(real, n, torch.Generator().manual_seed(n), "cpu")
    mask = cases.prep_mask(kind, trees, lens)
    results = []
    for device in ("cpu", "cuda"):
        out = buffers(bs, n, sum(lens) + n * real, index_dtype, device)
        moved = [
            t.to(device) if t is not None else None for t in (table, rows, torch.tensor(lens, dtype=seq_dtype), mask)
        ]
        ops.mla_prep(*moved, kind, real, bs, n, *out)
        results.append([t.cpu() for t in out])
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_without_drafts_it_counts_what_there_is(index_dtype):
    """As a decode step has it: the new tokens are in seq_lens and in req_to_token already."""
    results = []
    for device in ("cpu", "cuda"):
        table = torch.arange(3 * 5000, device=device).int().view(3, 5000).flip(1)
        rows, lens = torch.tensor([2, 0, 2**40], device=device), torch.tensor([4, 5000, 1], device=device)
        indptr, indices, _ = buffers(3, 1, 5004, index_dtype, device)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        ops.mla_prep(table, rows, lens, None, abi.MASK_NONE, 2, 3, 0, indptr, indices, nothing)
        results.append((indptr.cpu(), indices.cpu()))
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)


@pytest.mark.parametrize("raw_bs", [1, 3, 4])
def test_prep_and_replay_never_synchronise(path, raw_bs):
    """Prep outside, verify inside a graph, new lengths and masks each step, sync debug mode on; same bits as eager."""
    bs, n, heads, context = 4, 12, 8, 4000
    gen = torch.Generator().manual_seed(raw_bs)
    pool = torch.randn(bs * (context + n), 1, KEY_DIM, device="cuda").to(torch.bfloat16)
    table = torch.randperm(bs * (context + n), device="cuda").int().view(bs, context + n)
    q_nope = torch.randn(heads, bs * n, 512, device="cuda").to(torch.bfloat16).transpose(0, 1)
    q_pe = torch.randn(bs * n, heads, 64, device="cuda").to(torch.bfloat16)
    out = torch.empty(bs * n, heads, 512, dtype=torch.bfloat16, device="cuda")
    cut = paths.target(torch.device("cuda"), path).cut(bs, n, heads)
    workspace = torch.empty(workspace_floats(bs, n, heads, bs * cut.splits), device="cuda")
    indptr, indices, packed = buffers(bs, n, bs * (context + n), torch.int32, "cuda")
    qo = torch.arange(0, (bs + 1) * n, n, dtype=torch.int32, device="cuda")
    steps = []
    for _ in range(3):
        lens = torch.randint(0, context, (raw_bs,), generator=gen)
        trees = cases.random_trees(raw_bs, n, gen, "cuda")
        steps.append(
            (lens.cuda(), cases.byte_mask(trees, lens.tolist(), torch.bool), torch.randperm(bs)[:raw_bs].cuda())
        )

    def prep(lens, mask, rows):
        ops.mla_prep(table, rows, lens, mask, abi.MASK_FULL, raw_bs, bs, n, indptr, indices, packed)

    def verify():
        ops.mla_verify(
            q_nope,
            q_pe,
            pool,
            indptr,
            indices,
            qo,
            None,
            packed,
            None,
            abi.MASK_PACKED,
            bs,
            n,
            cut.splits,
            0.05,
            0.0,
            out,
            workspace,
            path=path,
            taper=cut.taper,
        )

    prep(*steps[0])
    verify()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify()
    for lens, mask, rows in steps:
        out.fill_(float("nan"))
        workspace.fill_(float("nan"))
        with no_synchronisation():
            prep(lens, mask, rows)
            graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        verify()
        assert torch.equal(replayed, out)
        mask_at = (torch.cat([torch.zeros(1), (n * (lens.cpu() + n)).cumsum(0)])).long()
        expected = reference.mla_verify(
            q_nope, q_pe, pool, indptr, indices, qo, None, mask, mask_at, abi.MASK_FULL, raw_bs, n, 0.05
        )
        assert reference.worst_row_error(replayed, expected) <= 5e-3
        assert not replayed[raw_bs * n :].any()


@pytest.mark.parametrize("capacity", [0, 11, 25, 200])
def test_writes_stay_inside_rows_and_buffers(capacity):
    """Lengths beyond a row of req_to_token are cut there, and nothing is written past kv_indices."""
    n, width = 4, 10
    table = torch.arange(30, dtype=torch.int32, device="cuda").view(3, width)
    memory = torch.full((300,), -7, dtype=torch.int32, device="cuda")
    indptr, _, packed = buffers(3, n, 0, torch.int32, "cuda")
    rows, lens = torch.tensor([2, 0, 1], device="cuda"), torch.tensor([9, 3, 1000], device="cuda")
    ops.mla_prep(table, rows, lens, None, abi.MASK_NONE, 3, 3, n, indptr, memory[:capacity], packed)
    assert indptr[:4].tolist() == [0, 10, 17, 27]
    expected = torch.cat([table[2], table[0, :7], table[1]])[:capacity]
    assert torch.equal(memory[: len(expected)], expected) and (memory[len(expected) :] == -7).all()
