# SPDX-License-Identifier: Apache-2.0
"""At temperature 1 the tokens a DDTREE server draws have the target's own joint law.

    python3 tests/e2e/sampling.py --target DIR --draft DIR --work DIR --out OUT/sampling.json

Many requests of four new tokens for each of a few prompts; the first comes from the prefill, the others from verify
steps. What is expected is exact (law.py): the target alone says how likely every token is after every string
that is likely enough. Pearson's test over the cells of all prompts together must give p > 1e-3 for DDTREE and for the
target's own draws, and must not for trees whose mask was dropped, nor against the law at another temperature. An MLA
target on FlashInfer in bf16, and a grouped-query one in float32 on Triton, there with top-k too.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent)]

import report  # noqa: E402
import side_by_side  # noqa: E402
import tiny_gqa  # noqa: E402
from law import DEPTH, Cell, Rule, fit, law, rounding, together  # noqa: E402
from lossless import EXACT, FLOAT32, ROOM, Server, inputs_of  # noqa: E402
from modes import DDTREE, WIDE, engine_arguments  # noqa: E402
from scheduler_hooks import engine  # noqa: E402

PROMPTS, DRAWS = 4, 2000
"""Prompts, and draws for each of them."""
PASS = 1e-3
MOST_STEPS = 2.6
"""Verify steps a request: three where nothing is accepted."""
LIMIT_S = 330

OTHER = 1.3
"""A temperature that must be told apart from the one drawn at."""
RULES = {"plain": Rule(), "top_k": Rule(0.8, 4)}
RULES_OF = {"mla": ("plain",), "gqa": ("plain", "top_k")}

_DROP = {"TREEVERIFY_DROP_MASK_FOR_TEST": "1"}
_WIDE = {**DDTREE, "speculative_num_draft_tokens": WIDE}
SERVERS = {
    "mla_alone": Server("mla"),
    "mla_tree": Server("mla", DDTREE),
    "mla_dropped": Server("mla", DDTREE, environment=_DROP),
    "gqa_alone": Server("gqa", FLOAT32, ("native",), EXACT),
    "gqa_tree": Server("gqa", {**FLOAT32, **_WIDE}, ("native",), EXACT),
    "gqa_dropped": Server("gqa", {**FLOAT32, **_WIDE}, ("native", "causal"), EXACT),
}
RIGHT = ("mla_alone", "mla_tree", "gqa_alone", "gqa_tree")
CAPACITY: dict[str, Any] = {
    "disable_radix_cache": False, "cuda_graph_bs": [1, 8, 16, 32, 48], "cuda_graph_max_bs": 48,
    "max_running_requests": 48, **ROOM,
}  # fmt: skip


def chosen_prompts(model: str, target: Path) -> list[list[int]]:
    """The first prompts of the shortest length."""
    inputs = inputs_of(model, target)
    return [prompt for prompt in inputs if len(prompt) == len(inputs[0])][:PROMPTS]


def next_laws(alone: Any, prompt: list[int], strings: Sequence[Cell], batch: int) -> list[torch.Tensor]:
    """Log-probabilities of the token after prompt + string, float64 [V], from the target's own prefill."""
    vocabulary, found = alone.tokenizer_manager.model_config.vocab_size, []
    for at in range(0, len(strings), batch):
        answers = alone.generate(
            input_ids=[prompt + list(string) for string in strings[at : at + batch]],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=vocabulary,
        )
        for answer in answers:
            logprobs = torch.full((vocabulary,), -math.inf, dtype=torch.float64)
            for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][0]:
                logprobs[token] = logprob
            found.append(logprobs)
    return found


def laws(alone: Any, prompt: list[int], rule: Rule, rounds: bool) -> dict[str, Any]:
    """A prompt's law at `rule` and at temperature OTHER, and what rounding adds to the statistic, if it `rounds`."""
    both = (rule, rule._replace(temperature=OTHER))

    def ask(batch: int) -> dict[Cell, list[float]]:
        return law(lambda strings: next_laws(alone, prompt, strings, batch), DRAWS, both)

    cells, added = ask(16), 0.0
    if rounds:
        single = ask(1)
        added = rounding({cell: p for cell, p in cells.items() if cell in single}, single, DRAWS)
    return {"cells": [[list(cell), p] for cell, p in cells.items()], "rounding": added}


def serve(name: str, target: Path, draft: Path, work: Path, port: int) -> None:
    """Runs one server: draws for every prompt and rule; the target alone also says what is expected."""
    server = SERVERS[name]
    os.environ.update(server.environment)
    if server.arguments.get("dtype") == "float32":
        os.environ["TRITON_CACHE_DIR"] = str(work / "triton_float32")
    inputs, begin = chosen_prompts(server.model, target), time.time()
    arguments = {"port": port, "nccl_port": port + 50, **CAPACITY, **server.arguments}
    started = engine(server.hooks, engine_arguments(target, draft, **arguments))
    ready, result = time.time(), {}
    for rule in RULES_OF[server.model]:
        answers = started.generate(
            input_ids=[prompt for prompt in inputs for _ in range(DRAWS)], sampling_params=RULES[rule].sampling(DEPTH)
        )
        steps = [answer["meta_info"].get("spec_verify_ct", DEPTH - 1) for answer in answers]
        draws = [answer["output_ids"] for answer in answers]
        result[rule] = {
            "draws": [draws[at : at + DRAWS] for at in range(0, len(draws), DRAWS)],
            "steps": sum(steps) / len(steps),
        }
        if name.endswith("_alone"):
            rounds = server.arguments.get("dtype") != "float32"
            result[rule]["laws"] = [laws(started, prompt, RULES[rule], rounds) for prompt in inputs]
    seconds = {"start": round(ready - begin, 1), "serve": round(time.time() - ready, 1)}
    side_by_side.save(work, name, {"rules": result, "seconds": seconds})
    started.shutdown()


def judge(name: str, rule: str, data: dict[str, Any], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for one server's draws under one rule: against the law, and for a right server against another one."""
    tables = [{tuple(cell): p for cell, p in one["cells"]} for one in expected]
    drawn, speculates = data["rules"][rule], not name.endswith("_alone")
    rows = []
    for against, right in ((0, name in RIGHT), (1, False)) if name in RIGHT else ((0, False),):
        tests = [fit(draws, cells, against) for draws, cells in zip(drawn["draws"], tables, strict=True)]
        whole = together(tests)
        rows.append({
            "server": name, "rule": rule, "law": rule if against == 0 else f"temperature {OTHER}",
            "must_fit": right, "draws": sum(map(len, drawn["draws"])), "statistic": whole.statistic,
            "freedom": whole.freedom, "p": whole.p, "p_of_prompts": [test.p for test in tests],
            "rounding": sum(one["rounding"] for one in expected), "steps_a_request": drawn["steps"],
            "seconds": data["seconds"],
            "ok": (whole.p > PASS) == right and (not right or not speculates or drawn["steps"] < MOST_STEPS),
        })  # fmt: skip
    return rows


def main() -> None:
    args = side_by_side.arguments(__doc__, SERVERS, 24000)
    gqa = (args.work / "gqa" / "target", args.work / "gqa" / "draft")
    folders = {"mla": (args.target, args.draft), "gqa": gqa}
    if args.serve:
        serve(args.serve, *folders[SERVERS[args.serve].model], args.work, args.port)
        return
    tiny_gqa.write(args.work / "gqa")
    options = ["--target", str(args.target), "--draft", str(args.draft)]
    side_by_side.run(__file__, SERVERS, args.work, options, args.port, LIMIT_S)
    found = {name: data for name in SERVERS if (data := side_by_side.load(args.work, name)) is not None}
    rows: list[dict[str, Any]] = []
    for name, server in SERVERS.items():
        for rule in RULES_OF[server.model]:
            if name in found and f"{server.model}_alone" in found:
                rows += judge(name, rule, found[name], found[f"{server.model}_alone"]["rules"][rule]["laws"])
            else:
                rows.append({"server": name, "rule": rule, "ok": False, "missing": "a server wrote nothing"})
    report.write(args.out, rows, depth=DEPTH, prompts=PROMPTS, draws_a_prompt=DRAWS, passes_above=PASS)
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
