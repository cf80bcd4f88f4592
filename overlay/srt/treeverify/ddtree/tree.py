# SPDX-License-Identifier: Apache-2.0
"""The draft trees of one step, built on the device, of fixed shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..attention.plan import mask_words
from ..attention.reference import unpack_mask
from . import ops  # noqa: F401 - defines the ops

_tree_build = torch.ops.treeverify.tree_build.default
_tree_walk = torch.ops.treeverify.tree_walk.default


class Candidates(NamedTuple):
    """The K likeliest tokens of each drafted position, most likely first."""

    ids: torch.Tensor
    """int64 [bs, B - 1, K]."""
    logprobs: torch.Tensor
    """fp32 [bs, B - 1, K], over the whole vocabulary."""


@dataclass(frozen=True)
class DraftTree:
    """One tree a request; node 0 is the bonus token. Nodes past a tree's size are padding that no path reaches."""

    tokens: torch.Tensor
    """int64 [bs, n]."""
    positions: torch.Tensor
    """int64 [bs, n]: where each token stands in its sequence."""
    parents: torch.Tensor
    """int32 [bs, n], -1 for the root and for padding."""
    depths: torch.Tensor
    """int32 [bs, n]."""
    mask: torch.Tensor
    """int64 [bs, n, ceil(n / 64)]: bit j of row i = node i sees node j."""
    next_token: torch.Tensor
    """int64 [bs, n]: first child or -1."""
    next_sibling: torch.Tensor
    """int64 [bs, n]: next child of the same parent or -1."""
    scores: torch.Tensor
    """fp32 [bs, n]: log-probability of the path under the drafter, -inf for padding."""
    sizes: torch.Tensor
    """int32 [bs]: nodes with the root; -1 where the drafter's log-probabilities hold NaN, and only the root is real."""
    depth: int
    """Drafted positions, B - 1: no path is longer."""

    @classmethod
    def build(cls, candidates: Candidates, root: torch.Tensor, prefix_lens: torch.Tensor, n: int) -> DraftTree:
        """The n - 1 likeliest prefixes of the drafted positions below each root.

        Args:
            candidates: of each request's drafted positions.
            root: int64 [bs], the bonus tokens.
            prefix_lens: int32 or int64 [bs], tokens committed before the root.
            n: nodes a tree, the root among them.
        """
        (bs, depth, _), device = candidates.ids.shape, root.device
        longs = torch.empty(4, bs, n, dtype=torch.int64, device=device)
        ints = torch.empty(2, bs, n, dtype=torch.int32, device=device)
        mask = torch.empty(bs, n, mask_words(n), dtype=torch.int64, device=device)
        scores = torch.empty(bs, n, dtype=torch.float32, device=device)
        sizes = torch.empty(bs, dtype=torch.int32, device=device)
        tokens, positions, next_token, next_sibling = longs
        parents, depths = ints
        _tree_build(
            candidates.logprobs, candidates.ids, root, prefix_lens, n, tokens, positions, parents, depths, mask,
            next_token, next_sibling, scores, sizes,
        )  # fmt: skip
        return cls(tokens, positions, parents, depths, mask, next_token, next_sibling, scores, sizes, depth)

    def visible(self) -> torch.Tensor:
        """bool [bs, n, n]: the mask, unpacked."""
        return unpack_mask(self.mask, self.mask.shape[1])

    def walk_on_device(self, predicted: torch.Tensor) -> Walked:
        """The path of each tree that the target itself takes; the host neither waits nor learns of it.

        Args:
            predicted: int64 [bs, n], the target's token after each node.
        """
        deep = self.depth + 1
        result = torch.empty(predicted.shape[0], 2 * deep + 2, dtype=torch.int64, device=predicted.device)
        self._walk(predicted, result)
        return Walked((result[:, 0] + 1).to(torch.int32), result[:, 2 : 2 + deep], result[:, 2 + deep :])

    def _walk(self, predicted: torch.Tensor, result: torch.Tensor) -> None:
        _tree_walk(self.tokens, self.next_token, self.next_sibling, self.sizes, predicted, self.depth, result)

    def walk(self, predicted: torch.Tensor, scores: torch.Tensor | None = None) -> tuple[list[Path], list[float]]:
        """The path of each tree that the target itself takes. One copy to the host, which waits for the device.

        Args:
            predicted: int64 [bs, n], the target's token after each node.
            scores: fp32 [bs, m] of trees that were built, where their promise is wanted.

        Returns:
            The paths, and the promise [m]: probability of each node under the drafter, mean over the trees.
        """
        bs, deep = predicted.shape[0], self.depth + 1
        row = 2 * deep + 2
        promised = 0 if scores is None else scores.shape[1]
        copied = torch.empty(bs * row + promised, dtype=torch.int64, device=predicted.device)
        self._walk(predicted, copied[: bs * row].view(bs, row))
        if scores is not None:
            torch.mean(scores.exp(), 0, dtype=torch.float64, out=copied[bs * row :].view(torch.float64))
        there = copied.cpu()
        paths = [
            Path(size, nodes=nodes[: accepted + 1], tokens=nodes[deep : deep + accepted + 1])
            for accepted, size, *nodes in there[: bs * row].view(bs, row).tolist()
        ]
        return paths, there[bs * row :].view(torch.float64).tolist()


class Walked(NamedTuple):
    """What the target took of each tree, on the device. Entries behind a length are -1."""

    lengths: torch.Tensor
    """int32 [bs], from 1: tokens committed, and new tokens."""
    nodes: torch.Tensor
    """int64 [bs, B]: root, then the accepted nodes in order."""
    tokens: torch.Tensor
    """int64 [bs, B]: the accepted tokens, then the target's own next one."""

    @property
    def bonus(self) -> torch.Tensor:
        """int64 [bs]: the target's own next token, which the next step starts from."""
        return self.tokens.gather(1, self.lengths.long()[:, None] - 1)[:, 0]


class Path(NamedTuple):
    """What the target took of one tree."""

    size: int
    """Nodes of the tree; -1: the drafter's log-probabilities held NaN."""
    nodes: list[int]
    """Root, then the accepted nodes in order: their KV and hidden states stay."""
    tokens: list[int]
    """The accepted tokens, then the target's own next one: as many as there are nodes."""
