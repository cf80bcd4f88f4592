# SPDX-License-Identifier: Apache-2.0
"""Serves the prompts with one mode's sglang.Engine and writes what came out.

    python3 tests/e2e/serve.py --mode ngram --target DIR --draft DIR --out DIR [--port N]

Greedy. Every prompt runs twice in batches of six (a bucket of eight, two rows of padding): NGRAM learns from what it
has served, so the second pass has fuller trees. A mode that is traced serves a little more under the profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scripts")]

from modes import MODES, engine_arguments  # noqa: E402
from scheduler_hooks import engine as started_engine  # noqa: E402

LENGTHS, PER_LENGTH, NEW_TOKENS, BATCH = (150, 600, 1500), 8, 96, 6


def prompts(target: Path) -> list[list[int]]:
    """Token ids cut from the standard library's held-out files."""
    from kit import bpe, corpus
    from kit.prompts import make

    tokenizer, files = bpe.load(target), corpus.sources(None)
    made = [make(tokenizer, files, length, PER_LENGTH) for length in LENGTHS]
    return [prompt.input_ids for column in zip(*made, strict=True) for prompt in column]


def generate(engine: Any, inputs: list[list[int]], new_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy outputs of a batch, each with its output_ids and meta_info."""
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return engine.generate(input_ids=inputs, sampling_params=sampling, **more)


def serve(engine: Any, inputs: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of prompt number, pass, output and tokens a verify step."""
    rows = []
    for run in range(2):
        for at in range(0, len(inputs), BATCH):
            for i, answer in enumerate(generate(engine, inputs[at : at + BATCH], NEW_TOKENS)):
                steps = answer["meta_info"].get("spec_verify_ct")
                rows.append({"prompt": at + i, "pass": run, "output": answer["output_ids"], "steps": steps})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", choices=sorted(MODES), required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder; the file is MODE.json, traces go beside it")
    parser.add_argument("--port", type=int, default=31000)
    args = parser.parse_args()
    mode, done = MODES[args.mode], args.out / f"{args.mode}.json"
    if done.exists():
        print(f"{done} exists")
        return
    os.environ.update(mode.environment)
    ports = {"port": args.port, "nccl_port": args.port + 50}
    inputs, begin = prompts(args.target), time.time()
    engine = started_engine(mode.hooks, engine_arguments(args.target, args.draft, **ports, **mode.arguments))
    started = time.time() - begin
    rows = serve(engine, inputs)
    served = time.time() - begin - started
    if mode.trace:
        folder = args.out / f"trace-{args.mode}"
        engine.start_profile(output_dir=str(folder), activities=["CPU", "GPU"], record_shapes=False)
        generate(engine, inputs[:BATCH], 16)
        engine.stop_profile()
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = {"start": round(started, 1), "serve": round(served, 1)}
    done.write_text(json.dumps({"mode": args.mode, "seconds": seconds, "rows": rows}))
    print(f"{args.mode}: {len(rows)} outputs, start {started:.0f} s, serve {served:.0f} s", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
