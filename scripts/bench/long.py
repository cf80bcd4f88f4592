# SPDX-License-Identifier: Apache-2.0
"""One request of 100k tokens: what a step of the server takes with trees by treeverify, and by SGLang's own kernels.

Random weights of a large MLA model's attention geometry (ddtree/models.py), so only times mean anything. NGRAM needs no
drafter and verifies as many tokens in every step, whatever the backend: it compares verify kernels and nothing else.
DDTREE is compared with DFLASH, a chain as wide as the tree, whose drafter is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .ddtree import speed
from .ddtree.modes import NONE, engine_arguments
from .store import Row

CONTEXT, WIDTH = 100_000, 16
"""Tokens of the request; tokens that the target sees of it in a step."""

LOG_INTERVAL = 4
"""Decode steps a line of the log: NGRAM may take few, since what a random model writes repeats itself."""

KEY = ("server", "card", "build")

TRITON_OVER_OURS, OURS_OVER_CHAIN = 20.0, 1.0
"""Goals: SGLang's Triton step takes at least so many times ours, ours at most so many times FlashInfer's chain."""


class Server(NamedTuple):
    """One server that is timed, alone on the GPU."""

    algorithm: str | None
    backend: str
    environment: dict[str, str]
    what: str
    """For people."""


STOCK, STOCK_TRITON = {"TREEVERIFY_DISABLE": "1"}, {"TREEVERIFY_TRITON": "0"}
SERVERS = {
    "ngram": Server("NGRAM", "flashinfer", {}, "NGRAM's tree, treeverify"),
    "ngram_flashinfer": Server("NGRAM", "flashinfer", STOCK, "NGRAM, stock FlashInfer: verified as a chain"),
    "ngram_triton": Server("NGRAM", "triton", STOCK, "NGRAM's tree, stock Triton"),
    "ddtree": Server("DDTREE", "flashinfer", {}, "DDTREE, treeverify"),
    "dflash": Server("DFLASH", "flashinfer", STOCK, "DFLASH's chain, stock FlashInfer"),
    "ddtree_triton": Server("DDTREE", "triton", STOCK_TRITON, "DDTREE, verified by SGLang's Triton kernel"),
    "none": Server(None, "flashinfer", STOCK, "no speculation, stock FlashInfer"),
}
"""The most telling first."""


def arguments(server: Server, target: Path, draft: Path, port: int) -> dict[str, Any]:
    """Of its sglang.Engine."""
    own: dict[str, Any] = {
        **engine_arguments(NONE, target, draft, server.backend, port), "attention_backend": server.backend,
        "cuda_graph_bs": [1], "cuda_graph_max_bs": 1, "max_running_requests": 1, "load_format": "dummy",
        "decode_log_interval": LOG_INTERVAL,
        "mem_fraction_static": 0.7, "max_total_tokens": CONTEXT + 8192, "context_length": CONTEXT + 4096,
    }  # fmt: skip
    if server.algorithm:
        own |= {"speculative_algorithm": server.algorithm, "speculative_num_draft_tokens": WIDTH}
    if server.algorithm == "NGRAM":
        own |= {"speculative_ngram_max_bfs_breadth": 6}
    elif server.algorithm:
        own |= {
            "speculative_draft_model_path": str(draft),
            "speculative_draft_attention_backend": "flashinfer",
        }
    return own


def measure(engine: Any, log: Any, runs: int) -> Row:
    """The run in the middle of `runs`, as speed.measure's row; `failed` where steps ran outside CUDA graphs."""
    cell = speed.Cell(CONTEXT, 1)
    speed.prepare(engine, [cell])
    found = sorted((speed.measure(engine, cell, log) for _ in range(runs)), key=lambda row: float(row["step_ms"]))
    row = {**found[len(found) // 2], "runs_ms": [round(run["step_ms"], 4) for run in found]}
    return row if all(run["graph"] for run in found) else {**row, "failed": "steps ran outside CUDA graphs"}


def gates(rows: Iterable[Row]) -> Iterator[Row]:
    """The goals; `met` is None while a measurement is missing."""
    steps = {row["server"]: row["step_ms"] for row in rows if "failed" not in row}
    for ours, chain, triton in (("ngram", "ngram_flashinfer", "ngram_triton"), ("ddtree", "dflash", "ddtree_triton")):
        yield _gate(f"{SERVERS[triton].what} / {ours}", f">= {TRITON_OVER_OURS:g}", _ratio(steps, triton, ours),
                    lambda got: got >= TRITON_OVER_OURS)  # fmt: skip
        yield _gate(f"{ours} / {SERVERS[chain].what}", f"<= {OURS_OVER_CHAIN:g}", _ratio(steps, ours, chain),
                    lambda got: got <= OURS_OVER_CHAIN)  # fmt: skip


def _ratio(steps: Mapping[str, float], over: str, under: str) -> float | None:
    return steps[over] / steps[under] if over in steps and under in steps else None


def _gate(name: str, goal: str, got: float | None, met: Any) -> Row:
    return {"gate": name, "goal": goal, "got": got and float(f"{got:.4g}"), "met": None if got is None else met(got)}


def table(rows: Iterable[Row]) -> list[str]:
    """Markdown: a line a server, slowest last, with the stages of DDTREE's steps."""
    found = {row["server"]: row for row in rows if "failed" not in row}
    lines = [f"One request of {CONTEXT} tokens, {WIDTH} tokens a step.", "", "| server | ms a step | of which, ms |",
             "|---|---|---|"]  # fmt: skip
    for name in sorted(found, key=lambda name: float(found[name]["step_ms"])):
        stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in found[name].get("stages_ms", {}).items())
        lines.append(f"| {SERVERS[name].what} | {found[name]['step_ms']:.2f} | {stages} |")
    return lines if found else []
