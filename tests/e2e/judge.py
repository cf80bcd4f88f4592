# SPDX-License-Identifier: Apache-2.0
"""Scores what the speculative servers wrote with the target alone, by teacher forcing, and judges it.

    python3 tests/e2e/judge.py --target DIR --outputs DIR --out OUT/outputs.json     (modes: $TV_MODES, or all)

The target alone (no speculation) is given prompt and output and says how likely each output token was. Greedy output of
a right server misses the most likely token by rounding only: its deficit, log p(best) - log p(token), stays within
FACTOR times the gap between two no-speculation runs at different batch sizes. The gap is the largest of: the log
probabilities of the same tokens scored at batch 1 and 8; those of the same tokens generated at batch 1 and 6; the
deficits of the two runs' own output. A server that drops the tree mask must go beyond the margin. Servers with an fp8
KV cache are judged by a target with one, on SGLang's own kernels throughout; its gap is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import report  # noqa: E402
from modes import MODES, chosen, engine_arguments  # noqa: E402
from scheduler_hooks import engine as started_engine  # noqa: E402
from serve import BATCH, NEW_TOKENS, generate, prompts  # noqa: E402

FACTOR = 2.0
ALONE = 12
"""Prompts that the target also serves one at a time."""


def score(engine: Any, sequences: list[tuple[list[int], list[int]]], batch: int) -> list[list[tuple[float, float]]]:
    """(log p(token), log p(best)) of every output token, per (prompt, output), `batch` sequences at a time."""
    scored = []
    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    for at in range(0, len(sequences), batch):
        part = sequences[at : at + batch]
        answers = engine.generate(
            input_ids=[prompt + output for prompt, output in part],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=[len(prompt) - 1 for prompt, _ in part],
            top_logprobs_num=1,
        )
        for (_, output), answer in zip(part, answers, strict=True):
            own = answer["meta_info"]["input_token_logprobs"][-len(output) :]
            best = answer["meta_info"]["input_top_logprobs"][-len(output) :]
            # SGLang reports the last id of the vocabulary, and what lies beyond, as 0
            if [entry[1] for entry in own] != [token if token < vocabulary - 1 else 0 for token in output]:
                raise AssertionError("the scored tokens are not the output's")
            scored.append([(mine[0], top[0][0]) for mine, top in zip(own, best, strict=True)])
    return scored


def deficits(scored: list[list[tuple[float, float]]]) -> list[float]:
    return [best - own for row in scored for own, best in row]


def generated(engine: Any, inputs: list[list[int]], batch: int) -> tuple[list[list[int]], list[list[float]]]:
    """Outputs of the target alone and the log probabilities it gave their tokens."""
    outputs, logprobs = [], []
    for at in range(0, len(inputs), batch):
        for answer in generate(engine, inputs[at : at + batch], NEW_TOKENS, return_logprob=True):
            outputs.append(answer["output_ids"])
            logprobs.append([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    return outputs, logprobs


def agreement(a: list[int], b: list[int]) -> int:
    """Tokens before two outputs part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def measure_gap(engine: Any, inputs: list[list[int]]) -> tuple[dict[str, float], list[list[int]]]:
    """The parts of the gap, and the target's outputs in batches of BATCH."""
    together, together_lp = generated(engine, inputs, BATCH)
    alone, alone_lp = generated(engine, inputs[:ALONE], 1)
    pairs = [(p, o) for p, o in zip(inputs, together, strict=True)]
    first, second = score(engine, pairs[:ALONE], 1), score(engine, pairs, 8)
    rescored = [abs(x[0] - y[0]) for a, b in zip(first, second, strict=False) for x, y in zip(a, b, strict=True)]
    decoded = [
        abs(x - y)
        for a, b, x_row, y_row in zip(alone, together, alone_lp, together_lp, strict=False)
        for x, y in zip(x_row[: agreement(a, b)], y_row, strict=False)
    ]
    own = deficits(second) + deficits(score(engine, [(p, o) for p, o in zip(inputs, alone, strict=False)], 8))
    return {"rescored": max(rescored), "decoded": max(decoded), "own_deficit": max(own)}, together


def judge(
    engine: Any, inputs: list[list[int]], base: list[list[int]], name: str, data: dict[str, Any], margin: float
) -> dict:
    """One row: how far a server's output strays from what the target alone prefers."""
    rows, right = data["rows"], MODES[name].right
    scored = score(engine, [(inputs[row["prompt"]], row["output"]) for row in rows], 8)
    misses = deficits(scored)
    beyond = sum(miss > margin for miss in misses)
    steps = sum(row["steps"] or 0 for row in rows)
    return {
        "mode": name, "tokens": len(misses), "worst_deficit": max(misses), "mean_deficit": sum(misses) / len(misses),
        "beyond_margin": beyond, "outputs_equal_to_base": sum(row["output"] == base[row["prompt"]] for row in rows),
        "outputs": len(rows), "tokens_per_step": len(misses) / steps if steps else None, "must_be_right": right,
        "seconds": data["seconds"], "ok": (beyond == 0) == right,
    }  # fmt: skip


def judge_all(
    target: Path, outputs: Path, inputs: list[list[int]], names: list[str], **arguments: Any
) -> tuple[list[dict[str, Any]], dict[str, float], float]:
    """Rows of the servers of one KV cache's dtype, the target's gap with it, and the margin."""
    engine = started_engine((), engine_arguments(target, **arguments))
    gap, base = measure_gap(engine, inputs)
    margin, rows = FACTOR * max(gap.values()), []
    for name in names:
        path = outputs / f"{name}.json"
        if path.exists():
            rows.append(judge(engine, inputs, base, name, json.loads(path.read_text()), margin))
        else:
            rows.append({"mode": name, "ok": False, "missing": "its server wrote nothing"})
    engine.shutdown()
    return rows, gap, margin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True, help="folder that serve.py wrote to")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    parser.add_argument("--port", type=int, default=30900)
    args = parser.parse_args()
    os.environ["TREEVERIFY_DISABLE"] = "1"  # the target alone is SGLang as it is
    inputs, modes = prompts(args.target), chosen()
    rows, margins = [], {}
    for number, pool in enumerate(dict.fromkeys(mode.kv_cache_dtype for mode in modes.values())):
        names = [name for name, mode in modes.items() if mode.kv_cache_dtype == pool]
        ports = {"port": args.port + 200 * number, "nccl_port": args.port + 200 * number + 50}
        found, gap, margin = judge_all(args.target, args.outputs, inputs, names, kv_cache_dtype=pool, **ports)
        rows += found
        margins[pool] = {"gap": gap, "margin": margin}
    report.write(args.out, rows, factor=FACTOR, margins=margins)
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
