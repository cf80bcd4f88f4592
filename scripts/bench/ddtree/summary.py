# SPDX-License-Identifier: Apache-2.0
"""What the rows add up to: tokens a second, and the goals with whether they are met.

Tokens a second are composed: batch size times tokens a step of the trained models (greedy, stage `acceptance`) over the
wall time of a step with random weights (stage `speed`). No single run shows them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..store import Row
from .acceptance import TEMPERATURES, ratio
from .modes import CHAIN, NONE, Mode, adaptive, tree
from .speed import CELLS, Cell

MARGIN = 2.0
"""Standard errors that a tree no wider than the chain may seem to lie below it."""

STEP_WIDTH, STEP_LIMIT = 16, 1.15

ADAPTIVE_SHARE = 0.97
"""Of the tokens a second of the best fixed width."""


class Rows:
    """The rows that succeeded, by what they measured."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            if "failed" not in row:
                point = row["temperature"] if row["stage"] == "acceptance" else Cell(row["context"], row["bs"])
                self._rows[row["stage"], row["mode"], row["n"], point] = row

    def acceptance(self, mode: Mode, temperature: float = 0.0) -> Row | None:
        return self._rows.get(("acceptance", *mode, temperature))

    def speed(self, mode: Mode, cell: Cell) -> Row | None:
        return self._rows.get(("speed", *mode, cell))

    def tokens_a_second(self, mode: Mode, cell: Cell) -> float | None:
        """Of the whole batch, composed; None while one part is missing."""
        step, tokens = self.speed(mode, cell), self._tokens(mode, cell)
        return cell.bs * tokens / step["step_ms"] * 1e3 if step and tokens else None

    def _tokens(self, mode: Mode, cell: Cell) -> float | None:
        """A step and request, greedy. Adaptive: between those of fixed widths, at the mean number of nodes."""
        if mode.adapts:
            step = self.speed(mode, cell)
            return self._interpolated(step["nodes"]) if step else None
        found = self.acceptance(mode)
        return found["tokens_per_step"] if found else None if mode.speculates else 1.0

    def _interpolated(self, nodes: float | None) -> float | None:
        points = sorted((row["n"], row["tokens_per_step"]) for key, row in self._rows.items()
                        if (key[0], key[1], key[3]) == ("acceptance", "ddtree", 0.0))  # fmt: skip
        for (left, low), (right, high) in itertools.pairwise(points):
            if nodes is not None and left <= nodes <= right:
                return low + (high - low) * (nodes - left) / (right - left)
        return None


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
    """One row a cell and mode: step time, over the chain's; tokens a second, composed."""
    result = []
    for cell in CELLS:
        chain = rows.speed(CHAIN, cell)
        for mode in modes:
            if step := rows.speed(mode, cell):
                row: Row = {**cell._asdict(), "mode": mode.name, "step_ms": step["step_ms"]}
                if chain:
                    row["step_over_chain"] = round(step["step_ms"] / chain["step_ms"], 3)
                if (rate := rows.tokens_a_second(mode, cell)) is not None:
                    row["composed_tokens_per_s"] = round(rate, 1)
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
    pairs = [(rows.speed(tree(STEP_WIDTH), cell), rows.speed(CHAIN, cell)) for cell in CELLS]
    over = [ours["step_ms"] / chain["step_ms"] for ours, chain in pairs if ours and chain]
    whole = len(over) == len(CELLS)
    note = "" if whole else f" ({len(over)} of {len(CELLS)} cells measured)"
    worst = max(over, default=None)
    met = worst <= STEP_LIMIT if worst is not None and (whole or worst > STEP_LIMIT) else None
    yield _gate(f"step, tree of {STEP_WIDTH} / chain, worst cell", f"<= {STEP_LIMIT:g}{note}", worst, met)


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
    rates = {width: rate for width in widths if (rate := rows.tokens_a_second(tree(width), cell)) is not None}
    chain = rows.tokens_a_second(CHAIN, cell)
    if not rates or chain is None:
        return _gate(name, ">= 1", None, None)
    best = max(rates, key=lambda width: rates[width])
    over = rates[best] / chain
    met = over >= 1 if over >= 1 or len(rates) == len(widths) else None
    row = _gate(name, ">= 1", over, met) | {"best_width": best}
    if (alone := rows.tokens_a_second(NONE, cell)) is not None:
        row["over_no_speculation"] = round(rates[best] / alone, 3)
    return row


def _adaptive_gate(rows: Rows, mode: Mode, cell: Cell, widths: Sequence[int]) -> Row:
    name = f"composed tokens/s at {cell.context} tokens, batch {cell.bs}, adaptive / best fixed width"
    goal = f">= {ADAPTIVE_SHARE:g}"
    rates = [rate for width in widths if (rate := rows.tokens_a_second(tree(width), cell)) is not None]
    ours = rows.tokens_a_second(mode, cell)
    if ours is None or not rates:
        return _gate(name, goal, None, None)
    over = ours / max(rates)
    return _gate(name, goal, over, over >= ADAPTIVE_SHARE if len(rates) == len(widths) else None)


def _gate(name: str, goal: str, got: float | None, met: bool | None) -> Row:
    return {"gate": name, "goal": goal, "got": None if got is None else float(f"{got:.4g}"), "met": met}
