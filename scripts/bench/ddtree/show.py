# SPDX-License-Identifier: Apache-2.0
"""A report for people: tables in Markdown, and a picture of acceptance and speed against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..store import Row
from .acceptance import TEMPERATURES
from .modes import CHAIN, NONE, Mode, adaptive, tree
from .speed import CELLS
from .summary import Rows, accepted, cells

COLOURS = {1: "tab:blue", 4: "tab:orange", 8: "tab:green"}  # by batch size
LINES = {1024: "-", 16384: "--", 65536: ":"}  # by context


def widths_of(rows: Sequence[Row]) -> list[int]:
    """Nodes of the trees that were measured, ascending."""
    return sorted({row["n"] for row in rows if row["mode"] == "ddtree"})


def markdown(report: Row) -> str:
    """The tables of a report."""
    rows, modes = Rows(report["rows"]), _modes(report)
    parts = [_header(report), _accepted(rows, modes), _cells(rows, modes), _over(rows, modes), _stages(rows, modes)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def gate_lines(gates: Sequence[Row]) -> str:
    """The goals, a line each."""
    mark: dict[bool | None, str] = {True: "met ", False: "NOT ", None: "open"}
    lines = []
    for gate in gates:
        rounds = f", rounds: {gate['rounds']}" if "rounds" in gate else ""
        lines.append(f"{mark[gate['met']]} {gate['gate']}: {gate['got']} (goal {gate['goal']}{rounds})")
    return "\n".join(lines)


def _modes(report: Row) -> list[Mode]:
    widths = widths_of(report["rows"])
    return [NONE, CHAIN, *map(tree, widths), *(adaptive(widths) if widths else [])]


def _header(report: Row) -> list[str]:
    names = ("card", "driver", "torch", "sglang", "flashinfer", "commit")
    return [", ".join(f"{name} {report[name]}" for name in names if report.get(name))]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _accepted(rows: Rows, modes: Sequence[Mode]) -> list[str]:
    """Tokens a step by temperature."""
    body = []
    for row in accepted(rows, modes):
        over = f"{row['over_chain']:.3f} ± {row['standard_error']:.3f}" if "over_chain" in row else ""
        reached = " ".join(f"{share:.2f}" for share in row["reached"])
        body.append([f"{row['temperature']:g}", row["mode"], f"{row['tokens_per_step']:.3f}", over, reached])
    return _table(["temperature", "mode", "tokens a step", "over the chain", "steps that accept 1, 2, … drafts"], body)


def _cells(rows: Rows, modes: Sequence[Mode]) -> list[str]:
    """Milliseconds a step and composed tokens a second by cell."""
    body = []
    for (context, bs), found in _by_cell(rows, modes).items():
        line = [str(context), str(bs)]
        for mode in modes:
            row = found.get(mode.name, {})
            rate = f" ({row['composed_tokens_per_s']:.0f})" if "composed_tokens_per_s" in row else ""
            nodes = f", {row['nodes']:.0f} nodes" if row.get("nodes") else ""
            line.append(f"{row['step_ms']:.2f}{rate}{nodes}" if row else "-")
        rounds = sorted({row["rounds"] for row in found.values()})
        body.append([*line, "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))])
    head = ["context", "batch", *(mode.name for mode in modes), "rounds"]
    note = ("Milliseconds a step with random weights, median over rounds. In brackets tokens a second, composed: batch",
            "times tokens a step of the trained models (greedy), over that step.")  # fmt: skip
    return [*note, "", *_table(head, body)] if body else []


def _over(rows: Rows, modes: Sequence[Mode]) -> list[str]:
    """Step time and composed tokens a second over the chain's, by cell."""
    others = [mode for mode in modes if mode != CHAIN]
    body = []
    for (context, bs), found in _by_cell(rows, modes).items():
        line = [str(context), str(bs)]
        for mode in others:
            row = found.get(mode.name, {})
            rate = f" ({row['tokens_over_chain']:.3f})" if "tokens_over_chain" in row else ""
            line.append(f"{row['step_over_chain']:.3f}{rate}" if "step_over_chain" in row else "-")
        body.append(line)
    head = ["context", "batch", *(mode.name for mode in others)]
    note = f"A step over one of {CHAIN.name} in the same round, median over rounds. In brackets tokens a second so."
    return [note, "", *_table(head, body)] if body else []


def _by_cell(rows: Rows, modes: Sequence[Mode]) -> dict[tuple[int, int], dict[str, Row]]:
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in cells(rows, modes):
        found.setdefault((row["context"], row["bs"]), {})[row["mode"]] = row
    return found


def _stages(rows: Rows, modes: Sequence[Mode]) -> list[str]:
    """Device milliseconds of each stage of the trees' steps."""
    found = [row for row in cells(rows, modes) if "stages_ms" in row]
    names = list(dict.fromkeys(name for row in found for name in row["stages_ms"]))
    body = [[str(row["context"]), str(row["bs"]), row["mode"],
             *(f"{row['stages_ms'].get(name, 0):.2f}" for name in names)] for row in found]  # fmt: skip
    return _table(["context", "batch", "mode", *(f"{name} ms" for name in names)], body) if body else []


def draw(report: Row, target: Path) -> Path | None:
    """Writes a PNG to `target`: tokens a step, and composed tokens a second, against the budget.

    Returns:
        The path; None where matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    rows, widths = Rows(report["rows"]), widths_of(report["rows"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6))
    _draw_acceptance(left, rows, widths)
    _draw_speed(right, rows, widths)
    for axis in (left, right):
        axis.set_xlabel("budget, drafted tokens of a tree")
        axis.set_xticks([width - 1 for width in widths])
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"DDTREE, {report.get('card', 'unknown card')}")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def _draw_acceptance(axis: Any, rows: Rows, widths: Sequence[int]) -> None:
    for temperature, colour in zip(TEMPERATURES, ("tab:blue", "tab:red"), strict=True):
        found = [(width - 1, rows.acceptance(tree(width), temperature)) for width in widths]
        points = [(budget, row["tokens_per_step"]) for budget, row in found if row]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=f"tree, temperature {temperature:g}")
        if chain := rows.acceptance(CHAIN, temperature):
            label = f"chain of {CHAIN.width}, temperature {temperature:g}"
            axis.axhline(chain["tokens_per_step"], linestyle="--", color=colour, label=label)
    axis.set_title("Tokens a step, trained models", fontsize=10)
    axis.set_ylabel("tokens a step, bonus token counted")


def _draw_speed(axis: Any, rows: Rows, widths: Sequence[int]) -> None:
    for cell in CELLS:
        found = [(width - 1, rows.tokens_a_second(tree(width), cell)) for width in widths]
        points = [(budget, rate) for budget, rate in found if rate is not None]
        style: dict[str, Any] = {"color": COLOURS[cell.bs]}
        if points:
            label = f"{cell.context // 1024}k, batch {cell.bs}"
            axis.plot(*zip(*points, strict=True), "o", linestyle=LINES[cell.context], label=label, **style)
        if (rate := rows.tokens_a_second(CHAIN, cell)) is not None:
            axis.plot([CHAIN.width - 1], [rate], "x", markersize=9, **style)
    axis.plot([], [], "x", color="black", label=f"chain of {CHAIN.width}")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.yaxis.set_minor_formatter("{x:.0f}")
    axis.set_title("Tokens a second, composed", fontsize=10)
    axis.set_ylabel("tokens a second of the batch")
