# SPDX-License-Identifier: Apache-2.0
"""Random verify problems of any shape and layout, for tests, the self-test and the bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import abi, ops, paths, reference
from .plan import KEY_DIM, LATENT, ROPE, Cut, plan_size, workspace_floats


def random_trees(bs: int, n: int, generator: torch.Generator, device: torch.device | str) -> torch.Tensor:
    """Ancestor matrices of random trees: bool [bs, n, n], row i sees node i and its ancestors up to node 0."""
    parents = [[0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)] for _ in range(bs)]
    visible = torch.zeros(bs, n, n, dtype=torch.bool)
    for b in range(bs):
        for i in range(n):
            visible[b, i] = visible[b, parents[b][i]]
            visible[b, i, i] = True
    return visible.to(device)


@dataclass
class Case:
    """One verify step: the arguments of mla_verify, and the tree they mean.

    With `splits` the step is planned: mla_plan hands them out before mla_verify runs.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor
    out_cache_loc: torch.Tensor | None
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    mask_kind: int
    n: int
    kv_lens: list[int]  # prefix + draft
    visible: torch.Tensor  # bool [bs, n, n]
    sm_scale: float = 0.1
    logit_cap: float = 0.0
    nsplit: int = 1
    taper: int = 0
    path: int = abi.PATH_AUTO
    splits: int = 0
    k_scale: float = 1.0
    split_indptr: torch.Tensor | None = field(init=False)
    out: torch.Tensor = field(init=False)
    workspace: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.empty_like(self.q_nope, memory_format=torch.contiguous_format)
        splits, heads, device = self.splits or self.bs * self.nsplit, self.q_nope.shape[1], self.pool.device
        size = max(1, workspace_floats(self.bs, self.n, heads, splits))
        self.workspace = torch.empty(size, dtype=torch.float32, device=device)
        self.split_indptr = torch.empty(plan_size(self.bs), dtype=torch.int32, device=device) if self.splits else None
        self.poison()

    @property
    def bs(self) -> int:
        return len(self.kv_lens)

    def poison(self) -> None:
        """Fills what the kernel must overwrite, or must not trust, with NaN."""
        self.out.fill_(float("nan"))
        self.workspace.fill_(float("nan"))
        if self.split_indptr is not None:
            self.split_indptr.fill_(-1)

    def run(self) -> torch.Tensor:
        """Launches mla_plan where the step is planned, then mla_verify; returns `out` [T, H, 512]."""
        if self.split_indptr is not None:
            ops.mla_plan(self.kv_indptr, self.bs, self.splits, self.split_indptr)
        args = (self.q_nope, self.q_pe, self.pool, self.kv_indptr, self.kv_indices, self.qo_indptr, self.out_cache_loc)
        mask = (self.mask, self.mask_indptr, self.mask_kind)
        tail = (self.bs, self.n, self.nsplit, self.sm_scale, self.logit_cap, self.out, self.workspace)
        plan = (self.split_indptr, self.splits, self.path, 0 if self.splits else self.taper)
        ops.mla_verify(*args, *mask, *tail, *plan, self.k_scale)
        return self.out

    def expected(self) -> torch.Tensor:
        """The same step by the float64 reference, with the mask taken from `visible`."""
        packed = reference.pack_mask(self.visible)
        return reference.mla_verify(
            self.q_nope, self.q_pe, self.pool, self.kv_indptr, self.kv_indices, self.qo_indptr, self.out_cache_loc,
            packed, None, abi.MASK_PACKED, self.bs, self.n, self.sm_scale, self.logit_cap, self.k_scale,
        )  # fmt: skip


def byte_mask(visible: torch.Tensor, prefixes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """reference.full_mask as bytes of `dtype`."""
    return reference.full_mask(visible, prefixes).to(dtype)


def prep_mask(kind: int, visible: torch.Tensor, prefixes: Sequence[int]) -> torch.Tensor | None:
    """The custom_mask of mla_prep that means the trees `visible`, in form abi.MASK_*; none for MASK_NONE."""
    if kind == abi.MASK_NONE:
        return None
    if kind == abi.MASK_PACKED:
        return reference.pack_mask(visible)
    return byte_mask(visible, prefixes if kind == abi.MASK_FULL else [0] * len(prefixes), torch.bool)


def make_case(
    prefixes: Sequence[int],
    n: int,
    heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    k_scale: float = 1.0,
    device: torch.device | str = "cuda",
    seed: int = 0,
    mask_kind: int = abi.MASK_PACKED,
    mask_dtype: torch.dtype = torch.bool,
    two_source: bool = False,
    index_dtype: torch.dtype = torch.int32,
    qo_dtype: torch.dtype = torch.int32,
    nsplit: int | None = None,
    taper: int = 0,
    path: int = abi.PATH_AUTO,
    plan: bool = False,
    padded: int = 0,
    extra_tokens: int = 0,
    contiguous_slots: bool = False,
    pool: torch.Tensor | None = None,
    logit_cap: float = 0.0,
) -> Case:
    """Draws a verify step for requests with the given prefix lengths and a random tree of `n` nodes each.

    Args:
        kv_dtype: of the pool, `dtype` where left out.
        k_scale: keys and values are k_scale times what the pool holds.
        mask_kind: abi.MASK_NONE makes the trees causal chains.
        two_source: kv_indices holds the prefix only, out_cache_loc the draft slots.
        nsplit: splits of each request; chosen as a server does where left out, and `taper` with it.
        taper: how many of them are halved.
        path: abi.PATH_*.
        plan: let mla_plan share the splits out.
        padded: further requests of length 0, as a graph bucket has them (unified layout only).
        extra_tokens: rows of q past the last request.
        pool: [slots, 1, 576] to read from; else one that just fits is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    on_device = torch.Generator(device).manual_seed(seed)
    real, bs = len(prefixes), len(prefixes) + padded
    kv_lens = [p + n for p in prefixes]
    total = sum(kv_lens)
    slots = total + 64 if pool is None else pool.shape[0]
    order = torch.arange(slots) if contiguous_slots else torch.randperm(slots, generator=generator)
    if pool is None:
        pool = torch.randn(slots, 1, KEY_DIM, generator=on_device, device=device, dtype=torch.float32)
        pool[order[total:].to(device)] = float("nan")  # nobody's slots: reading one shows
        pool = pool.to(kv_dtype or dtype)
    per_request = list(order[:total].to(device).split(kv_lens))
    spans = [p if two_source else p + n for p in prefixes] + [0] * padded
    kept = [s[:p] if two_source else s for s, p in zip(per_request, prefixes, strict=True)]
    visible = random_trees(bs, n, generator, device)
    if mask_kind == abi.MASK_NONE:
        visible[:] = reference.causal(n, device)
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    if mask_kind == abi.MASK_PACKED:
        mask = reference.pack_mask(visible)
    elif mask_kind == abi.MASK_FULL:
        mask = byte_mask(visible[:real], prefixes, mask_dtype)
        mask_indptr = _indptr([n * k for k in kv_lens] + [0] * padded, torch.int64, device)
    elif mask_kind == abi.MASK_QLEN:
        mask = visible.view(-1).to(mask_dtype)
        mask_indptr = _indptr([n * n] * bs, torch.int64, device)
    tokens, target = bs * n + extra_tokens, paths.target(device, path, pool.dtype)
    cut = target.cut(bs, n, heads) if nsplit is None else Cut(nsplit, taper)

    def draw(width: int) -> torch.Tensor:  # [T, H, width] with the strides SGLang's absorbed projection leaves
        return torch.randn(heads, tokens, width, generator=on_device, device=device).to(dtype).transpose(0, 1)

    return Case(
        q_nope=draw(LATENT),
        q_pe=draw(ROPE).contiguous(),
        pool=pool,
        kv_indptr=_indptr(spans, torch.int32, device),
        kv_indices=torch.cat(kept).to(index_dtype),
        qo_indptr=_indptr([n] * bs, qo_dtype, device),
        out_cache_loc=_draft_slots(per_request, n, tokens) if two_source else None,
        mask=mask,
        mask_indptr=mask_indptr,
        mask_kind=mask_kind,
        n=n,
        kv_lens=kv_lens + [0] * padded,
        visible=visible,
        sm_scale=KEY_DIM**-0.5,
        logit_cap=logit_cap,
        nsplit=cut.splits,
        taper=cut.taper,
        path=path,
        splits=target.planned_splits(bs, n, heads) if plan else 0,
        k_scale=k_scale,
    )


def pool_of(kv_dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of make_case for a pool of `kv_dtype`: the queries' dtype, and a k_scale that no pool element is."""
    if kv_dtype in paths.FP8:
        return {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "k_scale": 0.7}
    return {"dtype": kv_dtype}


def _draft_slots(per_request: Sequence[torch.Tensor], n: int, tokens: int) -> torch.Tensor:
    slots = torch.cat([s[len(s) - n :] for s in per_request]).to(torch.int64)
    return torch.nn.functional.pad(slots, (0, tokens - len(slots)))


def _indptr(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=dtype).cumsum(0).to(dtype).to(device)
