# SPDX-License-Identifier: Apache-2.0
"""The exact law of the next few tokens under a target, cut into cells, and Pearson's test of draws against it.

A cell is a string of DEPTH tokens, or a shorter one followed by "anything else": strings are told apart as long as
enough draws are expected of them, so that no cell is rare. Probabilities are products of the target's own next-token
probabilities, so nothing is lost or estimated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

DEPTH = 4
LEAST = 5.0
"""Draws expected of a cell at least; rarer ones are pooled."""
NONE = 1e-6
"""Fewer expected draws than this are rounding of a probability of 0."""
ELSE = -1
"""Ends a cell: any token that has no cell of its own."""

Cell = tuple[int, ...]
NextLaws = Callable[[Sequence[Cell]], list[torch.Tensor]]
"""Log-probabilities, float64 [V], of the token after each of several continuations of the prompt."""


class Rule(NamedTuple):
    """How a server turns next-token probabilities into a draw."""

    temperature: float = 1.0
    top_k: int | None = None

    def apply(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Probabilities, float64 [V], from log-probabilities at temperature 1."""
        scaled = logprobs.double() / self.temperature
        if self.top_k is not None:
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], -math.inf)
        return scaled.softmax(-1)

    def sampling(self, new_tokens: int) -> dict[str, object]:
        """The same as sampling parameters of a request."""
        top_k = {} if self.top_k is None else {"top_k": self.top_k}
        return {"temperature": self.temperature, "max_new_tokens": new_tokens, "ignore_eos": True, **top_k}


def law(next_laws: NextLaws, draws: int, rules: Sequence[Rule]) -> dict[Cell, list[float]]:
    """Probabilities of the cells under each rule; the first rule says, with `draws`, how finely to cut."""
    cells: dict[Cell, list[float]] = {}
    frontier: dict[Cell, list[float]] = {(): [1.0] * len(rules)}
    for depth in range(1, DEPTH + 1):
        strings = list(frontier)
        deeper: dict[Cell, list[float]] = {}
        for string, logprobs in zip(strings, next_laws(strings), strict=True):
            mass = frontier[string]
            step = torch.stack([rule.apply(logprobs) for rule in rules], -1)  # [V, rules]
            whole = step * torch.tensor(mass, dtype=torch.float64)
            own = (whole[:, 0] * draws >= LEAST).nonzero()[:, 0].tolist()
            for token in own:
                (cells if depth == DEPTH else deeper)[(*string, token)] = whole[token].tolist()
            rest = (torch.tensor(mass, dtype=torch.float64) - whole[own].sum(0)).clamp_min(0)
            cells[(*string, ELSE)] = rest.tolist()
        frontier = deeper
    return cells


def cell_of(tokens: Sequence[int], cells: dict[Cell, list[float]]) -> Cell:
    """Where a draw of at least DEPTH tokens belongs."""
    for length in range(1, DEPTH + 1):
        string = (*tokens[:length],)
        if (string if length == DEPTH else (*string, ELSE)) not in cells:
            return (*string[:-1], ELSE)
    return (*tokens[:DEPTH],)


class Fit(NamedTuple):
    """Pearson's goodness of fit."""

    statistic: float
    freedom: int
    p: float


def chi_square(counts: Iterable[float], expected: Iterable[float]) -> Fit:
    """Observed against expected counts; cells that expect fewer than LEAST draws are pooled into one.

    A draw where none is expected makes p 0.
    """
    pairs = list(zip(counts, expected, strict=True))
    rare = [pair for pair in pairs if pair[1] < LEAST]
    pairs = [pair for pair in pairs if pair[1] >= LEAST]
    if rare:
        pooled = (sum(seen for seen, _ in rare), sum(due for _, due in rare))
        if pooled[1] < LEAST and pairs:  # too rare even together: they go with the smallest cell
            smallest = min(range(len(pairs)), key=lambda i: pairs[i][1])
            if pooled[0] > 0 and pooled[1] < NONE:
                return Fit(math.inf, len(pairs), 0.0)
            pairs[smallest] = (pairs[smallest][0] + pooled[0], pairs[smallest][1] + pooled[1])
        else:
            pairs.append(pooled)
    statistic = sum((seen - due) ** 2 / due for seen, due in pairs)
    return Fit(statistic, len(pairs) - 1, tail(statistic, len(pairs) - 1))


def together(tests: Sequence[Fit]) -> Fit:
    """Independent tests as one: statistics and degrees of freedom add."""
    statistic, freedom = sum(t.statistic for t in tests), sum(t.freedom for t in tests)
    return Fit(statistic, freedom, tail(statistic, freedom))


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom >= statistic)."""
    if freedom == 0 or math.isinf(statistic):
        return 1.0 if statistic == 0 else 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit(draws: Sequence[Sequence[int]], cells: dict[Cell, list[float]], rule: int = 0) -> Fit:
    """Draws, DEPTH tokens each, against the law under one of its rules."""
    seen = Counter(cell_of(tokens, cells) for tokens in draws)
    return chi_square([seen[cell] for cell in cells], [p[rule] * len(draws) for p in cells.values()])


def rounding(cells: dict[Cell, list[float]], again: dict[Cell, list[float]], draws: int) -> float:
    """What the difference of two laws over the same cells adds to the statistic on average."""
    return sum(draws * (p[0] - again[cell][0]) ** 2 / p[0] for cell, p in cells.items() if p[0] * draws >= LEAST)
