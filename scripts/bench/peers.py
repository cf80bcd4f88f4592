# SPDX-License-Identifier: Apache-2.0
"""The kernels SGLang has for the same step. Each maker returns a function that runs the peer and gives its output.

| peer | mask | KV |
|---|---|---|
| triton | tree | slots of size 1 |
| fa3_cascade | tree: the prefix, then the tree with a row a token, then a merge | slots of size 1 |
| fa2, fa3 | causal | slots of size 1 |
| flashmla | causal | pages of 64 |

Plans and page tables are made beforehand and not timed.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
from treeverify.attention import cases
from treeverify.attention.plan import KEY_DIM, LATENT

from .problems import Problems
from .shapes import Shape

Run = Callable[[], torch.Tensor]
"""Runs a kernel; the output is [T, H, 512]."""


class Peer(NamedTuple):
    """How to build and call a peer."""

    make: Callable[[Problems, cases.Case, Shape], Run]
    package: str  # whose version tells builds apart
    chain: bool = False  # causal only
    slots: str = "random"
    longest: int = 1 << 30  # contexts past it take too long to be worth the time


def build_of(peer: str) -> str:
    """Package and version a peer's code comes from."""
    package = PEERS[peer].package
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}, not installed"


def triton(problems: Problems, case: cases.Case, shape: Shape) -> Run:
    """SGLang's extend kernel: one program a head, prefix by kv_indices, draft rows from k and v, FULL mask."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    bs, n, prefix = shape.bs, shape.n, shape.kv
    slots = case.kv_indices.long().view(bs, prefix + n)
    q = torch.cat([case.q_nope, case.q_pe], -1).contiguous()
    k = case.pool[slots[:, prefix:].reshape(-1)]
    v, out = k[..., :LATENT].contiguous(), torch.empty_like(case.out)
    kv_indptr = torch.arange(bs + 1, device=q.device, dtype=torch.int32) * prefix
    mask = cases.byte_mask(case.visible, [prefix] * bs, torch.bool)
    mask_indptr = torch.arange(bs + 1, device=q.device) * (n * (prefix + n))
    qo, before = case.qo_indptr.long(), slots[:, :prefix].reshape(-1).contiguous()
    pool_v = case.pool[..., :LATENT]

    def run() -> torch.Tensor:
        extend_attention_fwd(
            q, k, v, out, case.pool, pool_v, qo, kv_indptr, before, mask, True, mask_indptr, n, 1.0, 1.0, case.sm_scale
        )
        return out

    return run


@functools.cache
def _flashinfer_workspace(backend: str) -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def flashinfer(problems: Problems, case: cases.Case, shape: Shape, backend: str) -> Run:
    """FlashInfer's paged MLA on the same slots."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(_flashinfer_workspace(backend), backend=backend)
    kv_len = torch.full((shape.bs,), shape.kv + shape.n, dtype=torch.int32, device="cuda")
    dtype, rope = case.pool.dtype, KEY_DIM - LATENT
    wrapper.plan(
        case.qo_indptr, case.kv_indptr, case.kv_indices, kv_len,
        shape.heads, LATENT, rope, 1, True, case.sm_scale, dtype, dtype,
    )  # fmt: skip
    q_nope, q_pe, out = case.q_nope.contiguous(), case.q_pe.contiguous(), torch.empty_like(case.out)
    ckv, kpe = case.pool[..., :LATENT], case.pool[..., LATENT:]

    def run() -> torch.Tensor:
        wrapper.run(q_nope, q_pe, ckv, kpe, out=out)
        return out

    return run


def tree_rows(slots: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every node as a request of its own that attends to the nodes it sees.

    Args:
        slots: int32 [bs, n], where the draft lies in the pool.
        visible: bool [bs, n, n].

    Returns:
        Page table int32 [bs * n, n], the slots seen first; and how many they are, int32 [bs * n].
    """
    bs, n = slots.shape
    seen_first = (~visible).int().argsort(dim=-1, stable=True)
    table = slots[:, None, :].expand(bs, n, n).gather(-1, seen_first)
    return table.reshape(bs * n, n).contiguous(), visible.sum(-1).int().view(-1)


def fa3_cascade(problems: Problems, case: cases.Case, shape: Shape) -> Run:
    """What SGLang's fa3 backend does for a tree: FA3 over the prefix, FA3 over the draft, the two merged."""
    from sgl_kernel import merge_state_v2
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    bs, n, prefix = shape.bs, shape.n, shape.kv
    slots = case.kv_indices.view(bs, prefix + n)
    before = slots[:, :prefix].contiguous()
    lengths = torch.full((bs,), prefix, dtype=torch.int32, device="cuda")
    table, seen = tree_rows(slots[:, prefix:], case.visible)
    each = torch.arange(bs * n + 1, dtype=torch.int32, device="cuda")
    common = {
        "q": case.q_pe.contiguous(),
        "qv": case.q_nope.contiguous(),
        "k_cache": case.pool[..., LATENT:].view(-1, 1, 1, KEY_DIM - LATENT),
        "v_cache": case.pool[..., :LATENT].view(-1, 1, 1, LATENT),
        "softmax_scale": case.sm_scale,
        "causal": False,
        "return_softmax_lse": True,
    }

    def run() -> torch.Tensor:
        a, lse_a, *_ = flash_attn_with_kvcache(
            page_table=before, cache_seqlens=lengths, cu_seqlens_q=case.qo_indptr, max_seqlen_q=n, **common
        )
        b, lse_b, *_ = flash_attn_with_kvcache(
            page_table=table, cache_seqlens=seen, cu_seqlens_q=each, max_seqlen_q=1, **common
        )
        merged: torch.Tensor = merge_state_v2(a, lse_a.T.contiguous(), b, lse_b.T.contiguous())[0]
        return merged

    return run


def flashmla(problems: Problems, case: cases.Case, shape: Shape) -> Run:
    """FlashMLA's dense decode over pages of 64."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    bs, n, heads = shape.bs, shape.n, shape.heads
    q = torch.cat([case.q_nope, case.q_pe], -1).contiguous().view(bs, n, heads, KEY_DIM)
    pages, table = case.pool.view(-1, 64, 1, KEY_DIM), problems.page_table(shape)
    lengths = torch.full((bs,), shape.kv + n, dtype=torch.int32, device="cuda")
    plan, splits = get_mla_metadata(lengths, n * heads, 1)

    def run() -> torch.Tensor:
        out, _ = flash_mla_with_kvcache(
            q, pages, table, lengths, LATENT, plan, splits, softmax_scale=case.sm_scale, causal=True
        )
        flat: torch.Tensor = out.view(bs * n, heads, LATENT)
        return flat

    return run


PEERS = {
    "flashmla": Peer(flashmla, "sglang-kernel", chain=True, slots="paged"),
    "fa2": Peer(functools.partial(flashinfer, backend="fa2"), "flashinfer-python", chain=True),
    "fa3": Peer(functools.partial(flashinfer, backend="fa3"), "flashinfer-python", chain=True),
    "fa3_cascade": Peer(fa3_cascade, "sglang-kernel"),
    "triton": Peer(triton, "sglang", longest=32768),
}
