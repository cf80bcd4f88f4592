# SPDX-License-Identifier: Apache-2.0
"""Pictures of the rows: latency against context, fraction of the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .gates import Find
from .shapes import KV, Shape

LINES = ((1, 8, 9), (1, 64, 9), (8, 8, 9), (8, 64, 9), (32, 16, 16), (8, 128, 64))
"""Batch size, heads, draft tokens of a panel."""

STYLE = {
    "portable": ("tab:blue", "o-"),
    "narrow": ("tab:cyan", "o--"),
    "hopper": ("tab:green", "s-"),
    "triton": ("tab:red", "x:"),
    "fa2": ("tab:orange", "^:"),
    "fa3": ("tab:brown", "v:"),
    "fa3_cascade": ("tab:purple", "D:"),
    "flashmla": ("black", "*:"),
}


def draw(find: Find, paths: Sequence[str], peers: Sequence[str], card: str, target: Path) -> list[Path]:
    """Writes TARGET-latency.png and TARGET-roofline.png.

    Returns:
        The files written; none where matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    return [
        _panels(pyplot, find, (*paths, *peers), "us", f"A verify step's attention, {card}", target, "latency"),
        _panels(pyplot, find, paths, "roofline", f"Fraction of the binding roofline, {card}", target, "roofline"),
    ]


def _panels(pyplot: Any, find: Find, impls: Sequence[str], field: str, title: str, target: Path, name: str) -> Path:
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), sharex=True, sharey=field == "roofline")
    for axis, (bs, heads, n) in zip(axes.flat, LINES, strict=True):
        for impl in impls:
            found = [(kv, find(impl, Shape(bs, heads, n, kv))) for kv in KV]
            points = [(kv, row[field]) for kv, row in found if row and field in row]
            if points:
                colour, line = STYLE[impl]
                axis.plot(*zip(*points, strict=True), line, color=colour, label=impl)
        axis.set_xscale("log")
        axis.set_title(f"batch {bs}, {heads} heads, {n} draft tokens", fontsize=10)
        axis.grid(alpha=0.3)
        if field == "us":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1)
    for axis in axes[1]:
        axis.set_xlabel("context, tokens a request")
    for axis in axes[:, 0]:
        axis.set_ylabel("microseconds" if field == "us" else "fraction")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(),
                                                                            strict=True)}  # fmt: skip
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(STYLE))
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path = target.with_name(f"{target.stem}-{name}.png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
