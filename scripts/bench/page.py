# SPDX-License-Identifier: Apache-2.0
"""One Markdown page of all reports in a folder: each section is made of one report, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import long
from .ddtree import show as trees
from .ddtree.rows import comparable
from .marshal import show as host
from .shapes import Shape

Report = dict[str, Any]


class Section(NamedTuple):
    """What is made of a report."""

    title: str
    files: tuple[str, ...]
    """Names a report of this kind may have."""
    body: Callable[[Report], list[str]]
    draw: Callable[[Report, Path], object] | None = None
    """Draws the pictures of a report beside it."""
    pictures: tuple[str, ...] = ()
    """Ends of their names, after the report's."""


def text(folder: Path, draw: bool = False) -> str:
    """The page.

    Args:
        folder: with reports, at any depth; links are relative to it.
        draw: draw the pictures again, where matplotlib is; else those that lie there are shown.

    Raises:
        ValueError: there is no report in it.
    """
    parts = [part for section in SECTIONS for path in _reports(folder, section)
             if (part := _part(folder, section, path, draw))]  # fmt: skip
    if not parts:
        names = ", ".join(name for section in SECTIONS for name in section.files)
        raise ValueError(f"{folder} holds none of {names}: run scripts/reproduce.sh on a machine with a GPU first")
    return "\n\n".join([f"# Measured: {_cards(folder)}", INTRODUCTION, *parts]) + "\n"


INTRODUCTION = (
    "Made by `python3 scripts/results_page.py` from the reports that lie here; `bash scripts/reproduce.sh` makes them\n"
    "again on a machine with a GPU. What is measured, and how, is said in docs/gpu.md. A goal without enough\n"
    "measurements is open."
)


def _reports(folder: Path, section: Section) -> list[Path]:
    return sorted(path for name in section.files for path in folder.rglob(name))


def _cards(folder: Path) -> str:
    paths = (path for section in SECTIONS for path in _reports(folder, section))
    cards = dict.fromkeys(str(_load(path)["card"]) for path in paths)
    return ", ".join(cards)


def _load(path: Path) -> Report:
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def _part(folder: Path, section: Section, path: Path, draw: bool) -> str:
    report = _load(path)
    body = section.body(report)
    if not body:
        return ""
    if draw and section.draw:
        section.draw(report, path)
    names = ("card", "driver", "torch", "sglang", "flashinfer", "commit")
    where = ", ".join(f"{name} {report[name]}" for name in names if report.get(name))
    lines = [f"## {section.title}", "", f"`{path.relative_to(folder).as_posix()}`: {where}.", "", *body]
    for end in section.pictures:
        picture = path.with_name(path.stem + end)
        if picture.exists():
            lines += ["", f"![{section.title}]({picture.relative_to(folder).as_posix()})"]
    return "\n".join(lines)


def _goals(report: Report) -> list[str]:
    """The goals; those with measurements missing are counted only."""
    told = [goal for goal in report["gates"] if goal["met"] is not None]
    lines = [f"| {goal['gate']} | {goal['goal']} | {goal['got']} | {'met' if goal['met'] else '**missed**'} |"
             for goal in told]  # fmt: skip
    table = ["", "| goal | | reached | |", "|---|---|---|---|", *lines] if lines else []
    count = len(report["gates"]) - len(told)
    return [*table, "", f"Goals that are open: {count}."] if count else table


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *rows)]


def _attention(report: Report) -> list[str]:
    shapes: list[Report] = report["shapes"]
    known = {row["impl"] for row in report["rows"]}
    impls = list(dict.fromkeys(name for shape in shapes for name in shape if name in known))

    def cell(shape: Report, impl: str) -> str:
        share = shape.get(f"{impl}_roofline")
        return f"{shape[impl]:.1f}" + (f" ({share:.0%})" if share else "") if impl in shape else "-"

    rows = [[*(shape[name] for name in Shape._fields), *(cell(shape, impl) for impl in impls)]
            for shape in shapes if any(impl in shape for impl in impls)]  # fmt: skip
    means = [f"* geometric mean of {mean['shapes']} shapes, {mean['path']} / {mean['peer']}: {mean['mean']}"
             for mean in report.get("means", [])]  # fmt: skip
    note = "Microseconds a layer, median of CUDA-graph replays; in brackets the fraction of the binding roofline."
    head = ["batch", "heads", "draft", "context", *impls]
    return [note, "", *_table(head, rows), "", *means, *_goals(report)] if rows else []


def _draw_attention(report: Report, path: Path) -> None:
    from . import gates, plots  # they know the peers, which need PyTorch

    ours = [row["impl"] for row in report["rows"] if f"{row['impl']}_roofline" in report["shapes"][0]]
    paths = list(dict.fromkeys(ours))
    peers = [name for name in plots.STYLE if name not in paths and any(row["impl"] == name for row in report["rows"])]
    plots.draw(gates.finder(report["rows"]), paths, peers, report["card"], path)


def _host(report: Report) -> list[str]:
    return ["What a verify step costs the host.", "", *host.table(report["rows"]).splitlines()]


def _ddtree(report: Report) -> list[str]:
    rows = [row for row in report["rows"] if comparable(row)]
    lines = trees.markdown({**report, "rows": rows}).splitlines()[2:]
    if len(rows) == len(report["rows"]):
        return [*lines, *_goals(report)]
    goals = [goal for goal in report["gates"] if goal["gate"].startswith("tokens a step")]
    note = "Its steps were timed without rounds, so servers cannot be compared by them: they are left out."
    return [*lines, "", note, *_goals({"gates": goals})]


def _kv(report: Report) -> list[str]:
    moves = [row for row in report["rows"] if row["what"] == "move" and "us" in row]
    rows = [[row["rows"], row["layers"], row["slots"], f"{row['us']:.1f}", f"{row['gbs']:.0f}", f"{row['of_copy']:.0%}"]
            for row in moves]  # fmt: skip
    head = ("rows", "layers", "slots", "µs", "GB/s, both ways", "of a copy's")
    goals = [f"* {goal['goal']}: {goal['found']} ({'met' if goal['met'] else '**missed**'})"
             for goal in report["gates"]]  # fmt: skip
    pays = [f"* {row['kv']} tokens, one layer: {row['random_us']:.1f} µs on random slots, {row['contiguous_us']:.1f} "
            f"in a row; a move pays after {row['steps_to_pay']:.0f} steps"
            for row in report["payback"] if row.get("steps_to_pay")]  # fmt: skip
    return [*_table(head, rows), "", *goals, "", *pays] if rows else []


def _long(report: Report) -> list[str]:
    return [*long.table(report["rows"]), *_goals(report)]


def _outputs(report: Report) -> list[str]:
    rows = [[row["mode"], "right" if row["must_be_right"] else "wrong, the check's control",
             "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
             f"{row['beyond_margin']} of {row['tokens']}", f"{row['worst_deficit']:.3g}"]
            for row in report["rows"] if "tokens" in row]  # fmt: skip
    note = f"Greedy outputs scored by the target alone; the margin is {report['margin']:.3g} nats."
    head = ("server", "must be", "tokens a step", "tokens beyond the margin", "worst deficit, nats")
    return [note, "", *_table(head, rows)] if rows else []


def _soak(report: Report) -> list[str]:
    rows = [row for row in report["rows"] if "waves" in row or "judged_tokens" in row or "soak" in row]
    lines = []
    for row in rows:
        said = "ok" if row["ok"] else "**not ok**"
        if "soak" in row:
            lines.append(f"* {row['seconds']} s, {row['requests']} requests ({row['goal']}): {said}")
        elif "waves" in row:
            sizes = f"{row['batch_sizes'][0]} to {row['batch_sizes'][-1]}" if row["batch_sizes"] else "none"
            lines.append(f"* {row['server']}: {row['waves']} waves, {row['complete']} requests, batches of {sizes}, "
                         f"{row['aborted']} aborted, {row['left']} left by their client, {row['stopped']} stopped by a "
                         f"string: {said}")  # fmt: skip
        else:
            lines.append(f"* {row['server']}, greedy outputs: {row['beyond_margin']} of {row['judged_tokens']} tokens "
                         f"beyond the margin of {row['margin']:.3g} nats: {said}")  # fmt: skip
    return lines


def _fuzz(report: Report) -> list[str]:
    lines = [f"Seed {report['seed']}: {report['cases']} random cases, {report['failed']} failed."]
    rows = [[row["path"], row["dtype"], row["cases"], f"{row['worst']:.2e}", f"{row['tolerance']:.0e}"]
            for row in report["rows"]]  # fmt: skip
    return [*lines, "", *_table(("path", "KV", "cases", "worst error", "limit"), rows)] if rows else lines


SECTIONS = (
    Section("Attention of a verify step", ("verify.json", "fp8.json"), _attention, _draw_attention,
            ("-latency.png", "-roofline.png")),
    Section("Host time", ("marshal.json",), _host),
    Section("Moved KV", ("kv.json",), _kv),
    Section("DDTREE", ("ddtree.json", "speed.json"), _ddtree,
            lambda report, path: all(map(comparable, report["rows"])) and trees.draw(report, path.with_suffix(".png")),
            (".png",)),
    Section("A step at 100k tokens", ("long.json",), _long),
    Section("What was served", ("outputs.json",), _outputs),
    Section("Under load", ("soak.json",), _soak),
    Section("Random cases", ("fuzz.json",), _fuzz),
)  # fmt: skip
