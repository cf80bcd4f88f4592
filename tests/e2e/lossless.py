# SPDX-License-Identifier: Apache-2.0
"""DDTREE writes what the target alone writes, token for token, and with a chain for a tree it is DFLASH.

    python3 tests/e2e/lossless.py --target DIR --draft DIR --work DIR --out OUT/lossless.json

Servers run side by side. In float32 on SGLang's own Triton backend, which honours masks and is not ours, greedy output
with trees of 16 and 64 nodes must equal greedy output without speculation: an MLA target (trained) and a grouped-query
one (tiny_gqa.py), on pages of one token and on larger ones; where the mask shows nodes each other's branches, or
accepted KV is not moved within its pages, it must not. In bf16, a tree of the block's length with one candidate a
position (TREEVERIFY_DDTREE_TOPK=1) must give DFLASH's tokens in DFLASH's number of steps, request by request. The
grouped-query target on FlashInfer in bf16 is judged by teacher forcing, as judge.py does it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import report  # noqa: E402
import side_by_side  # noqa: E402
import tiny_gqa  # noqa: E402
from judge import FACTOR, deficits, measure_gap, score  # noqa: E402
from modes import DDTREE, WIDE, WIDTH, engine_arguments, spec_v2  # noqa: E402
from scheduler_hooks import engine  # noqa: E402
from serve import BATCH, NEW_TOKENS, generate, prompts  # noqa: E402

LIMIT_S = 330
LEAST_TOKENS_A_STEP = 1.2
"""With fewer, too few drafts were accepted for equality to show anything."""


@dataclass(frozen=True)
class Server:
    """One server; `batch` requests at a time, one where bits must not depend on how requests meet."""

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    batch: int = BATCH


ROOM: dict[str, Any] = {"mem_fraction_static": 0.7, "context_length": 8192}
"""Keeps servers small enough for a dozen on one GPU: some buffers of SGLang's are as large as the context may be."""
BLOCK = 8
"""Block size of both drafters."""
FLOAT32: dict[str, Any] = {"dtype": "float32", "attention_backend": "triton"}
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton's float32 products are TF32 unless told otherwise."""


def exact(model: str, nodes: int = 0, *hooks: str, page: int = 1, defrag: bool = False) -> Server:
    """A float32 server on Triton: without speculation, or with trees of that many nodes, on pages of so many tokens."""
    tree = {**DDTREE, "speculative_num_draft_tokens": nodes, "page_size": page} if nodes else {}
    environment = {**EXACT, "TREEVERIFY_DEFRAG": "1"} if defrag else EXACT
    return Server(model, {**FLOAT32, **tree}, ("native", *hooks), environment)


def one_by_one(model: str, backend: str, algorithm: str) -> Server:
    """A bf16 server whose drafts are DFLASH's chain, drafted by either algorithm."""
    block = {"attention_backend": backend, "speculative_algorithm": algorithm, "speculative_num_draft_tokens": BLOCK}
    chain = {"TREEVERIFY_DDTREE_TOPK": "1"} if algorithm == "DDTREE" else {}
    return Server(model, {**DDTREE, **block}, environment=chain, batch=1)


SERVERS = {
    "mla_alone": exact("mla"),
    "mla_tree": exact("mla", WIDTH),
    "mla_wide": exact("mla", WIDE),
    "mla_causal": exact("mla", WIDTH, "causal"),
    "mla_pages": exact("mla", WIDTH, page=16),
    "mla_unmoved": exact("mla", WIDTH, "unmoved", page=16),
    "mla_compacted": exact("mla", WIDTH, "compact", defrag=True),
    "gqa_alone": exact("gqa"),
    "gqa_tree": exact("gqa", WIDTH),
    "gqa_wide": exact("gqa", WIDE),
    "gqa_causal": exact("gqa", WIDTH, "causal"),
    "gqa_pages": exact("gqa", WIDE, page=64),
    "mla_dflash": one_by_one("mla", "flashinfer", "DFLASH"),
    "mla_chain": one_by_one("mla", "flashinfer", "DDTREE"),
    "mla_dflash_triton": one_by_one("mla", "triton", "DFLASH"),
    "mla_chain_triton": one_by_one("mla", "triton", "DDTREE"),
    "gqa_flashinfer": Server("gqa", DDTREE),
}


@dataclass(frozen=True)
class Pair:
    """Two servers' outputs, which must be equal or, for a negative control, must not."""

    server: str
    like: str
    equal: bool = True
    steps: bool = False
    """Whether the number of steps of every request must be equal too."""


PAIRS = [
    Pair("mla_tree", "mla_alone"),
    Pair("mla_wide", "mla_alone"),
    Pair("mla_causal", "mla_alone", equal=False),
    Pair("mla_pages", "mla_alone"),
    Pair("mla_unmoved", "mla_alone", equal=False),
    Pair("mla_compacted", "mla_alone"),
    Pair("gqa_tree", "gqa_alone"),
    Pair("gqa_wide", "gqa_alone"),
    Pair("gqa_causal", "gqa_alone", equal=False),
    Pair("gqa_pages", "gqa_alone"),
    Pair("mla_chain", "mla_dflash", steps=True),
    Pair("mla_chain_triton", "mla_dflash_triton", steps=True),
]
FORCED = ["gqa_flashinfer"]
V2 = ("mla_dflash", "mla_chain", "mla_dflash_triton", "mla_chain_triton")
"""Servers that releases of spec v2 have: DDTREE there verifies on treeverify's kernels only, which read no float32."""


def here() -> list[str]:
    """The servers of this release."""
    return [name for name in SERVERS if name in V2 or not spec_v2()]



def inputs_of(model: str, target: Path) -> list[list[int]]:
    """Prompts for a model, the same in every process."""
    return prompts(target) if model == "mla" else tiny_gqa.prompts((20, 150, 600), 8)


def serve(name: str, target: Path, draft: Path, work: Path, port: int) -> None:
    """Runs one server over its prompts and saves the outputs."""
    server = SERVERS[name]
    os.environ.update(server.environment)
    if server.arguments.get("dtype") == "float32":
        os.environ["TRITON_CACHE_DIR"] = str(work / "triton_float32")
    inputs, begin = inputs_of(server.model, target), time.time()
    arguments = {"port": port, "nccl_port": port + 50, **ROOM, **server.arguments}
    started = engine(server.hooks, engine_arguments(target, draft, **arguments))
    ready, rows = time.time(), []
    for at in range(0, len(inputs), server.batch):
        for answer in generate(started, inputs[at : at + server.batch], NEW_TOKENS):
            rows.append({"output": answer["output_ids"], "steps": answer["meta_info"].get("spec_verify_ct")})
    seconds = {"start": round(ready - begin, 1), "serve": round(time.time() - ready, 1)}
    side_by_side.save(work, name, {"rows": rows, "seconds": seconds})
    started.shutdown()


def compare(pair: Pair, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """One row of the report."""
    both = list(zip(ours["rows"], theirs["rows"], strict=True))
    differences = [first_difference(a["output"], b["output"]) for a, b in both if a["output"] != b["output"]]
    same = len(both) - len(differences)
    row = {
        "server": pair.server, "like": pair.like, "must_be_equal": pair.equal, "outputs": len(both), "equal": same,
        "first_differences": differences, "tokens_per_step": tokens_a_step(ours["rows"]),
        "seconds": ours["seconds"],
    }  # fmt: skip
    right = (same == len(both)) == pair.equal and (not pair.equal or accepts(ours["rows"]))
    if pair.steps:
        row["equal_steps"] = sum(a["steps"] == b["steps"] for a, b in both)
        right = right and row["equal_steps"] == len(both)
    return {**row, "ok": right}


def first_difference(a: list[int], b: list[int]) -> int:
    """Position of the first token that differs; outputs of different lengths differ where the shorter ends."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tokens_a_step(rows: list[dict[str, Any]]) -> float | None:
    """Tokens a verify step yields; the prefill's own token is not one of them."""
    steps = sum(row["steps"] or 0 for row in rows)
    return sum(len(row["output"]) - 1 for row in rows) / steps if steps else None


def accepts(rows: list[dict[str, Any]]) -> bool:
    """Whether enough drafts were accepted for the run to show anything."""
    return (tokens_a_step(rows) or 0.0) >= LEAST_TOKENS_A_STEP


def force(target: Path, inputs: list[list[int]], found: dict[str, dict[str, Any]], port: int) -> list[dict[str, Any]]:
    """Rows for servers judged by teacher forcing with the target alone."""
    alone = engine((), engine_arguments(target, port=port, nccl_port=port + 50, **ROOM))
    gap, _ = measure_gap(alone, inputs)
    margin, rows = FACTOR * max(gap.values()), []
    for name, data in found.items():
        pairs = [(prompt, row["output"]) for prompt, row in zip(inputs, data["rows"], strict=True)]
        misses = deficits(score(alone, pairs, 8))
        beyond = sum(miss > margin for miss in misses)
        rows.append({
            "server": name, "forced": len(misses), "worst_deficit": max(misses), "margin": margin, "gap": gap,
            "beyond_margin": beyond, "tokens_per_step": tokens_a_step(data["rows"]), "seconds": data["seconds"],
            "ok": beyond == 0 and accepts(data["rows"]),
        })  # fmt: skip
    alone.shutdown()
    return rows


def main() -> None:
    args = side_by_side.arguments(__doc__, SERVERS, 20000)
    gqa = (args.work / "gqa" / "target", args.work / "gqa" / "draft")
    folders = {"mla": (args.target, args.draft), "gqa": gqa}
    if args.serve:
        serve(args.serve, *folders[SERVERS[args.serve].model], args.work, args.port)
        return
    tiny_gqa.write(args.work / "gqa")
    options = ["--target", str(args.target), "--draft", str(args.draft)]
    served = here()
    side_by_side.run(__file__, served, args.work, options, args.port, LIMIT_S)
    found = {name: data for name in served if (data := side_by_side.load(args.work, name)) is not None}
    rows: list[dict[str, Any]] = []
    for pair in PAIRS:
        if pair.server not in served:
            continue
        if pair.server in found and pair.like in found:
            rows.append(compare(pair, found[pair.server], found[pair.like]))
        else:
            rows.append({"server": pair.server, "like": pair.like, "ok": False, "missing": "a server wrote nothing"})
    forced = {name: found[name] for name in FORCED if name in found}
    rows += [
        {"server": name, "ok": False, "missing": "it wrote nothing"}
        for name in FORCED
        if name in served and name not in found
    ]
    if forced:
        rows += force(gqa[0], inputs_of("gqa", args.target), forced, args.port - 500)
    report.write(args.out, rows, new_tokens=NEW_TOKENS, seconds={n: d["seconds"] for n, d in found.items()})
    print(json.dumps({row["server"]: row["ok"] for row in rows}))
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
