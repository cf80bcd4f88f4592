# SPDX-License-Identifier: Apache-2.0
"""What the rows add up to: tokens a second, and the goals with whether they are met.

Tokens a second are composed: batch size times tokens a step of the trained models (greedy, stage `acceptance`) over the
wall time of a step with random weights (stage `speed`). No single run shows them. Servers are compared by the median
over rounds of their ratio within a round.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..store import Row
from .acceptance import TEMPERATURES, ratio
from .modes import CHAIN, NONE, Mode, adaptive, tree
from .speed import CELLS, Cell

MARGIN = 2.0
"""Standard errors that a tree no wider than the chain may seem to lie below it."""

STEP_WIDTH, STEP_LIMIT = 16, 1.15

ADAPTIVE_SHARE = 0.97
"""Of the tokens a second of the best fixed width."""


SETTLED = 3
"""Rounds from which on a ratio counts: one run that went wrong does not move the median of so many."""


class Over(NamedTuple):
    """One server over another."""

    ratio: float
    """Median over rounds."""
    rounds: int

    @property
    def settled(self) -> bool:
        """Whether a goal may be judged by it."""
        return self.rounds >= SETTLED


class Rows:
    """The rows that succeeded, by what they measured."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._acceptance: dict[tuple[Mode, float], Row] = {}
        self._speed: dict[tuple[Mode, Cell], dict[int, Row]] = {}
        for row in rows:
            mode = Mode(row["mode"], row["n"])
            if "failed" in row:
                continue
            if row["stage"] == "acceptance":
                self._acceptance[mode, row["temperature"]] = row
            else:
                self._speed.setdefault((mode, Cell(row["context"], row["bs"])), {})[row["round"]] = row

    def acceptance(self, mode: Mode, temperature: float = 0.0) -> Row | None:
        return self._acceptance.get((mode, temperature))

    def speed(self, mode: Mode, cell: Cell) -> Row | None:
        """Median step_ms of its rounds, their number, and means of what the server's log told."""
        runs = list(self._speed.get((mode, cell), {}).values())
        if not runs:
            return None
        names = dict.fromkeys(name for run in runs for name in run["stages_ms"])
        stages = {name: round(statistics.mean(run["stages_ms"].get(name, 0.0) for run in runs), 4) for name in names}
        nodes = [run["nodes"] for run in runs if run.get("nodes") is not None]
        return {"step_ms": statistics.median(run["step_ms"] for run in runs), "rounds": len(runs), "stages_ms": stages,
                "nodes": round(statistics.mean(nodes), 1) if nodes else None}  # fmt: skip

    def tokens_a_second(self, mode: Mode, cell: Cell) -> float | None:
        """Of the whole batch, composed, median over rounds; None while one part is missing."""
        rates = self._rates(mode, cell)
        return statistics.median(rates.values()) if rates else None

    def step_over(self, ours: Mode, theirs: Mode, cell: Cell) -> Over | None:
        """Step time of one server over another's."""
        times = [{number: run["step_ms"] for number, run in self._speed.get((mode, cell), {}).items()}
                 for mode in (ours, theirs)]  # fmt: skip
        return _over(*times)

    def tokens_over(self, ours: Mode, theirs: Mode, cell: Cell) -> Over | None:
        """Tokens a second, composed, of one server over another's."""
        return _over(self._rates(ours, cell), self._rates(theirs, cell))

    def _rates(self, mode: Mode, cell: Cell) -> dict[int, float]:
        """Tokens a second by round."""
        found = {}
        for number, run in self._speed.get((mode, cell), {}).items():
            if tokens := self._tokens(mode, run):
                found[number] = cell.bs * tokens / run["step_ms"] * 1e3
        return found

    def _tokens(self, mode: Mode, run: Row) -> float | None:
        """A step and request, greedy. Adaptive: between those of fixed widths, at the run's mean number of nodes."""
        if mode.adapts:
            return self._interpolated(run["nodes"])
        found = self.acceptance(mode)
        return found["tokens_per_step"] if found else None if mode.speculates else 1.0

    def _interpolated(self, nodes: float | None) -> float | None:
        points = sorted((mode.width, row["tokens_per_step"]) for (mode, temperature), row in self._acceptance.items()
                        if (mode, temperature) == (tree(mode.width), 0.0))  # fmt: skip
        for (left, low), (right, high) in itertools.pairwise(points):
            if nodes is not None and left <= nodes <= right:
                return low + (high - low) * (nodes - left) / (right - left)
        return None


def _over(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Over | None:
    """The median over the rounds that both have; None where there is none."""
    ratios = [value / theirs[number] for number, value in ours.items() if number in theirs]
    return Over(statistics.median(ratios), len(ratios)) if ratios else None


def accepted(rows: Rows, modes: Sequence[Mode]) -> list[Row]:
    """One row a mode and temperature: tokens a step, over the chain's, and its standard error."""
    result = []
    for temperature in TEMPERATURES:
        for mode in modes:
            if found := rows.acceptance(mode, temperature):
                row: Row = {"temperature": temperature, "mode": mode.name, "tokens_per_step": found["tokens_per_step"]}
                if (chain := rows.acceptance(CHAIN, temperature)) and mode != CHAIN:
                    over, error = ratio(found, chain)
                    row |= {"over_chain": round(over, 4), "standard_error": round(error, 4)}
                result.append(row | {"reached": found["reached"]})
    return result


def cells(rows: Rows, modes: Sequence[Mode]) -> list[Row]:
    """One row a cell and mode: step time; tokens a second, composed; both over the chain's."""
    result = []
    for cell in CELLS:
        for mode in modes:
            if step := rows.speed(mode, cell):
                row: Row = {**cell._asdict(), "mode": mode.name, "rounds": step["rounds"],
                            "step_ms": float(f"{step['step_ms']:.5g}")}  # fmt: skip
                if mode != CHAIN and (over := rows.step_over(mode, CHAIN, cell)):
                    row["step_over_chain"] = round(over.ratio, 3)
                if (rate := rows.tokens_a_second(mode, cell)) is not None:
                    row["composed_tokens_per_s"] = round(rate, 1)
                if mode != CHAIN and (over := rows.tokens_over(mode, CHAIN, cell)):
                    row["tokens_over_chain"] = round(over.ratio, 3)
                if mode.adapts:
                    row["nodes"] = step["nodes"]
                if step["stages_ms"]:
                    row["stages_ms"] = step["stages_ms"]
                result.append(row)
    return result


def gates(rows: Rows, widths: Sequence[int]) -> Iterator[Row]:
    """The goals. `met` is None while measurements are missing."""
    for temperature in TEMPERATURES:
        for width in sorted(widths):
            yield _acceptance_gate(rows, temperature, width)
    for cell in CELLS:
        yield _best_gate(rows, cell, widths)
    for mode, cell in itertools.product(adaptive(widths), CELLS):
        yield _adaptive_gate(rows, mode, cell, widths)
    yield _step_gate(rows)


def _acceptance_gate(rows: Rows, temperature: float, width: int) -> Row:
    name = f"tokens a step, tree of {width} / chain of {CHAIN.width}, temperature {temperature:g}"
    wider = width > CHAIN.width
    goal = "> 1" if wider else f">= 1, within {MARGIN:g} standard errors"
    ours, chain = rows.acceptance(tree(width), temperature), rows.acceptance(CHAIN, temperature)
    if not ours or not chain:
        return _gate(name, goal, None, None)
    over, error = ratio(ours, chain)
    met = over > 1 if wider else over >= 1 - MARGIN * error
    return _gate(name, goal, over, met) | {"standard_error": round(error, 4)}


def _best_gate(rows: Rows, cell: Cell, widths: Sequence[int]) -> Row:
    name = f"composed tokens/s at {cell.context} tokens, batch {cell.bs}, best tree / chain"
    found = {width: over for width in widths if (over := rows.tokens_over(tree(width), CHAIN, cell))}
    if not found:
        return _gate(name, ">= 1", None, None)
    best = max(found, key=lambda width: found[width].ratio)
    over = found[best]
    known = over.settled and (over.ratio >= 1 or all(width in found and found[width].settled for width in widths))
    row = _gate(name, ">= 1", over.ratio, over.ratio >= 1 if known else None)
    row |= {"rounds": over.rounds, "best_width": best}
    if alone := rows.tokens_over(tree(best), NONE, cell):
        row["over_no_speculation"] = round(alone.ratio, 3)
    return row


def _adaptive_gate(rows: Rows, mode: Mode, cell: Cell, widths: Sequence[int]) -> Row:
    """Over the fixed width that leaves it least."""
    name = f"composed tokens/s at {cell.context} tokens, batch {cell.bs}, adaptive / best fixed width"
    goal = f">= {ADAPTIVE_SHARE:g}"
    found = {width: over for width in widths if (over := rows.tokens_over(mode, tree(width), cell))}
    if not found:
        return _gate(name, goal, None, None)
    best = min(found, key=lambda width: found[width].ratio)
    share, whole = found[best].ratio, all(width in found and found[width].settled for width in widths)
    known = whole or (found[best].settled and share < ADAPTIVE_SHARE)
    row = _gate(name, goal, share, share >= ADAPTIVE_SHARE if known else None)
    return row | {"rounds": found[best].rounds, "best_width": best}


def _step_gate(rows: Rows) -> Row:
    found = {cell: over for cell in CELLS if (over := rows.step_over(tree(STEP_WIDTH), CHAIN, cell))}
    settled = [over.ratio for over in found.values() if over.settled]
    whole = len(settled) == len(CELLS)
    note = "" if whole else f", known in {len(settled)} of {len(CELLS)} cells"
    name, goal = f"step, tree of {STEP_WIDTH} / chain, worst cell", f"<= {STEP_LIMIT:g}{note}"
    if not found:
        return _gate(name, goal, None, None)
    worst = max(found, key=lambda cell: found[cell].ratio)
    broken = max(settled, default=0.0) > STEP_LIMIT
    row = _gate(name, goal, found[worst].ratio, not broken if whole or broken else None)
    return row | {"rounds": found[worst].rounds, **worst._asdict()}


def _gate(name: str, goal: str, got: float | None, met: bool | None) -> Row:
    return {"gate": name, "goal": goal, "got": None if got is None else float(f"{got:.4g}"), "met": met}
