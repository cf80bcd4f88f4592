# SPDX-License-Identifier: Apache-2.0
"""Verify steps of any size in a blink: what is large is drawn once, on the device, and shared by all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from treeverify.attention import abi, cases, paths, reference
from treeverify.attention.plan import KEY_DIM, LATENT, ROPE

from .shapes import Shape

SEED = 0
PAGE = 64
"""Positions a page of FlashMLA's pool."""

COMMON_POOL = 8 * 200_128
"""Slots a batch is spread over, where it needs no more: as many as a server has room for beside a large model."""

SLOTS = ("random", "contiguous", "paged")
"""How the positions of a batch lie in the pool; paged: whole pages of 64, in random order."""


class Problems:
    """Draws verify steps out of one pool.

    Args:
        slots: rows of the pool, a multiple of PAGE.
        device: where everything lives.
    """

    def __init__(self, slots: int, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(SEED)
        slots = -(-slots // PAGE) * PAGE
        self.pool = torch.empty(slots, 1, KEY_DIM, device=self.device, dtype=torch.bfloat16)
        self.pool.normal_(std=0.3, generator=self.generator)

    @functools.cache  # noqa: B019 - one object for the life of the program
    def _permutation(self, size: int) -> torch.Tensor:
        """int32 [size], random."""
        return torch.randperm(size, device=self.device, generator=self.generator).int()

    @functools.cache  # noqa: B019
    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The pool in another dtype."""
        return self.pool.to(dtype)

    @functools.cache  # noqa: B019
    def trees(self, bs: int, n: int) -> torch.Tensor:
        """bool [bs, n, n] of random trees: a few different ones, repeated."""
        few = cases.random_trees(min(bs, 4), n, torch.Generator().manual_seed(SEED), "cpu")
        return few.repeat(-(-bs // len(few)), 1, 1)[:bs].to(self.device)

    def order(self, kv_lens: Sequence[int], slots: str, pool_slots: int) -> torch.Tensor:
        """int32 [sum(kv_lens)]: the slot of each position, request after request."""
        total = sum(kv_lens)
        if slots == "contiguous":
            return torch.arange(total, device=self.device, dtype=torch.int32)
        if slots == "random":
            return self._permutation(pool_slots)[:total]
        counts = [-(-length // PAGE) for length in kv_lens]
        pages = self._permutation(pool_slots // PAGE)[: sum(counts)].split(counts)
        within = torch.arange(PAGE, device=self.device, dtype=torch.int32)
        spread = [(p[:, None] * PAGE + within).view(-1)[:length] for p, length in zip(pages, kv_lens, strict=True)]
        return torch.cat(spread)

    def spread(self, tokens: int) -> int:
        """Slots of the pool that a batch of so many tokens lies in."""
        size = self.pool.shape[0]
        return min(size, COMMON_POOL) if tokens <= COMMON_POOL else size

    def page_table(self, shape: Shape) -> torch.Tensor:
        """int32 [bs, pages]: the pages of a `paged` step of this shape."""
        count = -(-(shape.kv + shape.n) // PAGE)
        pages = self._permutation(self.spread(shape.bs * count * PAGE) // PAGE)
        return pages[: shape.bs * count].view(shape.bs, count).contiguous()

    def draw(
        self,
        prefixes: Sequence[int],
        n: int,
        heads: int,
        *,
        slots: str = "random",
        chain: bool = False,
        pool_slots: int | None = None,
        path: int = abi.PATH_AUTO,
        planned: bool = False,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> cases.Case:
        """A step of requests with the given context lengths and a tree of `n` nodes each.

        Args:
            slots: one of SLOTS.
            chain: causal, no mask.
            pool_slots: how much of the pool the batch is spread over; default: spread().
            path: abi.PATH_*.
            planned: let mla_plan share the splits out.
            kv_dtype: what the pool's elements are rounded to.
        """
        target = paths.target(self.device, path, kv_dtype)
        bs, kv_lens = len(prefixes), [prefix + n for prefix in prefixes]
        cut = target.cut(bs, n, heads)
        visible = reference.causal(n, self.device).expand(bs, n, n) if chain else self.trees(bs, n)
        used = pool_slots or self.spread(sum(-(-length // PAGE) * PAGE for length in kv_lens))

        q_nope, q_pe = self._queries(heads, bs * n)
        return cases.Case(
            q_nope=q_nope,
            q_pe=q_pe,
            pool=self.rounded(kv_dtype)[:used],
            kv_indptr=self._indptr(kv_lens),
            kv_indices=self.order(kv_lens, slots, used),
            qo_indptr=self._indptr([n] * bs),
            out_cache_loc=None,
            mask=None if chain else reference.pack_mask(visible),
            mask_indptr=None,
            mask_kind=abi.MASK_NONE if chain else abi.MASK_PACKED,
            n=n,
            kv_lens=kv_lens,
            visible=visible,
            sm_scale=KEY_DIM**-0.5,
            nsplit=cut.splits,
            taper=cut.taper,
            path=path,
            splits=target.planned_splits(bs, n, heads) if planned else 0,
        )

    @functools.lru_cache(maxsize=2)  # noqa: B019 - paths and peers of a shape get the same queries
    def _queries(self, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nope [tokens, heads, 512] with the strides of SGLang's absorbed projection, q_pe [tokens, heads, 64]."""
        nope = torch.empty(heads, tokens, LATENT, device=self.device, dtype=torch.bfloat16)
        rope = torch.empty(tokens, heads, ROPE, device=self.device, dtype=torch.bfloat16)
        return nope.normal_(generator=self.generator).transpose(0, 1), rope.normal_(generator=self.generator)

    def _indptr(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int().to(self.device)


def visible_pairs(case: cases.Case) -> int:
    """(query row, position) pairs the mask lets through."""
    heads = case.q_nope.shape[1]
    draft = int(case.visible.sum())
    return heads * (sum(case.n * (length - case.n) for length in case.kv_lens) + draft)
