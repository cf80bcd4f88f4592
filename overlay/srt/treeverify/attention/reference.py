# SPDX-License-Identifier: Apache-2.0
"""MLA verify attention in float64, written to be read: the yardstick of every test, bench and self-test."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .abi import MASK_FULL, MASK_NONE, MASK_PACKED
from .plan import LATENT, mask_words


def causal(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [n, n], row i sees columns 0 .. i."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    """Packs bool [..., n, n] into int64 words [..., n, ceil(n / 64)], bit j of row i = node i sees node j."""
    n = visible.shape[-1]
    words = mask_words(n)
    padded = torch.nn.functional.pad(visible.to(torch.int64), (0, words * 64 - n)).unflatten(-1, (words, 64))
    weights = torch.ones(64, dtype=torch.int64, device=visible.device) << torch.arange(64, device=visible.device)
    return (padded * weights).sum(-1)


def unpack_mask(words: torch.Tensor, n: int) -> torch.Tensor:
    """Inverse of pack_mask: int64 [..., n, W] to bool [..., n, n]."""
    bits = torch.arange(64, device=words.device)
    return ((words.view(torch.int64)[..., None] >> bits) & 1).bool().flatten(-2)[..., :n]


def full_mask(visible: torch.Tensor, prefix_lens: Sequence[int]) -> torch.Tensor:
    """SGLang's FULL form of a mask: with the columns of the prefix, all visible.

    Args:
        visible: bool [bs, n, n].
        prefix_lens: committed tokens of each request.

    Returns:
        bool, flat: [n, prefix + n] a request.
    """
    n = visible.shape[-1]
    mask = visible.new_ones(sum(n * (prefix + n) for prefix in prefix_lens))
    start = 0
    for mine, prefix in zip(visible, prefix_lens, strict=True):
        end = start + n * (prefix + n)
        mask[start:end].view(n, prefix + n)[:, prefix:] = mine
        start = end
    return mask


def request_mask(
    b: int,
    n: int,
    prefix: int,
    kind: int,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    max_q: int,
) -> torch.Tensor:
    """bool [n, n] of request b from any of the forms mla_verify takes; causal where the range leaves the tensor."""
    device = mask.device if mask is not None else "cpu"
    if kind == MASK_NONE or mask is None:
        return causal(n, device)
    if kind == MASK_PACKED:
        words = mask_words(max_q)
        return unpack_mask(mask.reshape(-1)[b * max_q * words :][: n * words].view(n, words), n)
    width = prefix + n if kind == MASK_FULL else n
    start = int(mask_indptr[b]) if mask_indptr is not None else b * max_q * max_q
    if start < 0 or start + n * width > mask.numel():
        return causal(n, device)
    return mask.reshape(-1)[start : start + n * width].view(n, width)[:, width - n :].bool()


def mla_verify(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    qo_indptr: torch.Tensor,
    out_cache_loc: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    mask_kind: int,
    bs: int,
    max_q: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """Attention output, float64 [T, H, 512]; rows that no request covers, or that see nothing, are 0.

    Arguments as torch.ops.treeverify.mla_verify.
    """
    tokens, heads, _ = q_nope.shape
    out = torch.zeros(tokens, heads, LATENT, dtype=torch.float64, device=q_nope.device)
    q = torch.cat([q_nope, q_pe], -1).double()
    pool = kv_buffer.view(-1, kv_buffer.shape[-1])
    kv_at, q_at = kv_indptr[: bs + 1].tolist(), qo_indptr[: bs + 1].tolist()
    for b in range(bs):
        q0, q1 = q_at[b], q_at[b + 1]
        n = q1 - q0
        slots = kv_indices[kv_at[b] : kv_at[b + 1]].long()
        if out_cache_loc is not None:
            slots = torch.cat([slots, out_cache_loc[q0:q1].long()])
        if n == 0 or len(slots) == 0:
            continue
        prefix = max(0, len(slots) - n)
        key = pool[slots].double() * k_scale
        score = torch.einsum("qhd,kd->hqk", q[q0:q1], key) * sm_scale
        if logit_cap > 0:
            score = logit_cap * torch.tanh(score / logit_cap)
        visible = torch.ones(n, len(slots), dtype=torch.bool, device=q.device)
        tree = request_mask(b, n, prefix, mask_kind, mask, mask_indptr, max_q).to(q.device)
        visible[:, prefix:] = tree[:, : len(slots) - prefix]
        score = score.masked_fill(~visible, float("-inf"))
        weight = torch.softmax(score, -1).nan_to_num(0.0)  # a row that sees nothing gives 0 / 0
        out[q0:q1] = torch.einsum("hqk,kd->qhd", weight, key[:, :LATENT])
    return out


def worst_row_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest ||out - ref|| / ||ref|| over the rows of the last dimension; inf where anything is not finite.

    Where the reference row is 0 the output row must be too (its norm counts as the error).
    """
    diff, size = (out.double() - ref.double()).norm(dim=-1), ref.double().norm(dim=-1)
    error = torch.where(size > 0, diff / size.clamp_min(1e-300), diff)
    return float(error.max()) if bool(torch.isfinite(out).all()) and error.numel() else float("inf")
