# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over two GPUs changes nothing but the time.

    python3 tests/e2e/two_gpus.py --target DIR --draft DIR --work DIR --out OUT/two_gpus.json

Exit 4, with nothing run, where there are fewer than two GPUs. Three parts, each resumed where it was cut off:

* attention of one layer at 100k tokens: 64 heads against the 32 that a GPU of two has, on both GPUs at once;
* tp 2 servers with CUDA graphs: no speculation, DFLASH, NGRAM, DDTREE, and DDTREE with its mask dropped;
* the same algorithms at tp 1, the target alone at tp 1, which scores all tp 2 outputs by teacher forcing as judge.py
  does, DDTREE at tp 2 and temperature 1 whose ranks compare their trees every step, and two servers that must
  stop: rank 1 drafts something else in one step; rank 1 has another manifest.

Ranks write down what became of every request; they must agree. Acceptance is compared step by step on the text that
tp 1 and tp 2 have in common.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import half_heads  # noqa: E402
import report  # noqa: E402
import side_by_side  # noqa: E402
import tp_verdicts  # noqa: E402
from judge import FACTOR, deficits, measure_gap, score  # noqa: E402
from lossless import ROOM, Server  # noqa: E402
from modes import MODES, engine_arguments  # noqa: E402
from scheduler_hooks import DIFFERING_STEP, STEPS, engine  # noqa: E402
from serve import BATCH, NEW_TOKENS, prompts  # noqa: E402

TOO_FEW_GPUS = 4
BUDGET_S, ATTENTION_S, SPECULATING_S, STOP_S = 415, 60, 230, 170
"""Seconds for all, for the first part, for the second, and for a server that must stop."""

TP1, TP2 = {**ROOM, "tp_size": 1, "decode_log_interval": 8}, {**ROOM, "tp_size": 2, "decode_log_interval": 8}
# FlashInfer's fused all-reduce, which SGLang turns on for this architecture, asks for NVLink multicast memory.
TP2["enforce_disable_flashinfer_allreduce_fusion"] = True
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SHARED = {
    **NO_MULTICAST,
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # servers at tp 1 lie on one GPU only
    "SGLANG_SKIP_P2P_CHECK": "1",  # servers side by side would read each other's half-written cache of it
}

CHECK = {"TREEVERIFY_CHECK_RANKS": "1"}
SAMPLED, SAMPLED_TOKENS = 384, 32
MANY: dict[str, Any] = {"cuda_graph_bs": [1, 8, 16, 32], "cuda_graph_max_bs": 32, "max_running_requests": 32}


def _server(mode: str, place: dict[str, Any], **more: Any) -> Server:
    """A mode of modes.py at a tensor-parallel size; "alone": no speculation."""
    arguments = MODES[mode].arguments if mode in MODES else {}
    environment = {**(MODES[mode].environment if mode in MODES else {}), **SHARED, **more.pop("environment", {})}
    return replace(Server("mla", {**place, **arguments}, ("steps",), environment), **more)


FORCED = {
    "alone_tp2": _server("alone", TP2),
    "dflash_tp2": _server("dflash", TP2),
    "ngram_tp2": _server("ngram", TP2),
    "ddtree_tp2": _server("ddtree", TP2),
    "dropped_tp2": _server("ddtree_mask_dropped", TP2),
}
"""Scored by the target alone."""
WRONG = "dropped_tp2"
STOPPING = {
    "differing_tp2": _server("ddtree", TP2, hooks=("other_candidates",), environment=CHECK),
    "foreign_tp2": _server("ddtree", TP2, hooks=("other_manifest",)),
}
STOPS_BY = {"differing_tp2": "trees", "foreign_tp2": "installation"}
CHECKED = "checked_tp2"
OTHERS = {
    "dflash_tp1": _server("dflash", {**TP1, "base_gpu_id": 0}),
    "ngram_tp1": _server("ngram", {**TP1, "base_gpu_id": 1}),
    "ddtree_tp1": _server("ddtree", {**TP1, "base_gpu_id": 0}),
    CHECKED: _server("ddtree", {**TP2, **MANY}, environment=CHECK),
    **STOPPING,
}
SERVERS = {**FORCED, **OTHERS}
JUDGE, GPUS = "judge", ("gpu0", "gpu1")
JUDGE_ARGUMENTS = {**TP1, "base_gpu_id": 1}
LIKE = {f"{mode}_tp2": f"{mode}_tp1" for mode in ("dflash", "ngram", "ddtree")}


def requests(name: str, inputs: list[list[int]]) -> list[list[tuple[str, list[int]]]]:
    """(id, prompt) of a server's requests, in batches that are sent one after the other.

    NGRAM learns from what it has served, and gets every prompt twice; the sampled ones come all at once. Without
    speculation steps are many, and every second prompt is enough.
    """
    if name == CHECKED:
        return [[(f"{i}", inputs[i % len(inputs)]) for i in range(SAMPLED)]]
    passes = 2 if name.startswith("ngram") else 1
    every = 2 if name.startswith("alone") else 1
    named = [[(f"{turn}-{i}", inputs[i]) for i in range(0, len(inputs), every)] for turn in range(passes)]
    return [turn[at : at + BATCH] for turn in named for at in range(0, len(turn), BATCH)]


def ask(started: Any, batch: list[tuple[str, list[int]]], sampled: bool) -> list[dict[str, Any]]:
    """Answers of one batch: request and output."""
    kind = {"temperature": 1.0, "max_new_tokens": SAMPLED_TOKENS} if sampled else {"temperature": 0.0}
    answers = started.generate(
        input_ids=[prompt for _, prompt in batch], rid=[rid for rid, _ in batch],
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **kind},
    )  # fmt: skip
    return [{"rid": rid, "output": a["output_ids"]} for (rid, _), a in zip(batch, answers, strict=True)]


def records(prefix: Path, ranks: int, count: int, patience_s: float = 20) -> list[list[dict[str, Any]]]:
    """What each rank wrote down of `count` requests; the slower rank may need a moment."""
    end = time.monotonic() + patience_s
    while True:
        paths = [Path(f"{prefix}.rank{rank}.jsonl") for rank in range(ranks)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        if all(text.count("\n") >= count for text in texts) or time.monotonic() > end:
            return [[json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()] for text in texts]
        time.sleep(0.1)


def serve(name: str, target: Path, draft: Path, work: Path, port: int) -> None:
    """Runs one server over its requests and saves outputs, their growth, and whether ranks agree."""
    server, steps, begin = SERVERS[name], work / f"{name}.steps", time.time()
    os.environ.update({**server.environment, STEPS: str(steps)})
    inputs = prompts(target)
    ports = {"port": port, "nccl_port": port + 50}
    started = engine(server.hooks, engine_arguments(target, draft, **ports, **server.arguments))
    ready = time.time()
    rows = [row for batch in requests(name, inputs) for row in ask(started, batch, name == CHECKED)]
    served = time.time()
    if name in STOPPING:
        print("it was not stopped", flush=True)
        started.shutdown()
        return
    ranks = records(steps, server.arguments["tp_size"], len(rows))
    growth = {record["rid"]: record["growth"] for record in ranks[0]}
    side_by_side.save(work, name, {
        "rows": [{**row, "growth": growth[row["rid"]]} for row in rows],
        "ranks": len(ranks), "differing": tp_verdicts.differing(ranks),
        "unlike_answers": tp_verdicts.differing([rows_of(rows), rows_of(ranks[0])]),
        "seconds": {"start": round(ready - begin, 1), "serve": round(served - ready, 1)},
    })  # fmt: skip
    started.shutdown()


def rows_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs only."""
    return [{"rid": row["rid"], "output": row["output"], "growth": None} for row in rows]


def watch_it_stop(name: str, options: list[str], work: Path, port: int, limit_s: float = STOP_S) -> None:
    """Runs a server that must stop, in a process of its own, and saves how it ended."""
    command = [sys.executable, __file__, "--serve", name, "--unwatched", "--work", str(work), "--port", str(port)]
    begin, code = time.monotonic(), None
    try:
        code = subprocess.run(command + options, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} still ran after {limit_s} s", flush=True)
    side_by_side.save(work, name, {"returncode": code, "seconds": round(time.monotonic() - begin, 1)})


def judge(target: Path, work: Path, port: int) -> None:
    """Scores the outputs there are with the target alone at tp 1, and saves gap, margin and scores."""
    os.environ.update(SHARED)
    inputs, begin = prompts(target), time.time()
    started = engine((), engine_arguments(target, port=port, nccl_port=port + 50, **JUDGE_ARGUMENTS))
    ready = time.time()
    gap, base = measure_gap(started, inputs)
    scores = {}
    for name in available(work):
        rows = (side_by_side.load(work, name) or {})["rows"]
        chosen = [int(row["rid"].split("-")[1]) for row in rows]
        misses = deficits(score(started, [(inputs[i], row["output"]) for i, row in zip(chosen, rows, strict=True)], 8))
        scores[name] = {
            "tokens": len(misses), "worst_deficit": max(misses), "mean_deficit": sum(misses) / len(misses),
            "deficits": [round(miss, 6) for miss in misses if miss > 0],
            "outputs": len(rows),
            "equal_to_tp1_alone": sum(row["output"] == base[i] for i, row in zip(chosen, rows, strict=True)),
        }  # fmt: skip
    seconds = {"start": round(ready - begin, 1), "judge": round(time.time() - ready, 1)}
    side_by_side.save(work, JUDGE, {"gap": gap, "margin": FACTOR * max(gap.values()), "scores": scores,
                                    "seconds": seconds})  # fmt: skip
    started.shutdown()


def available(work: Path) -> list[str]:
    """Servers whose outputs can be scored."""
    return [name for name in FORCED if (work / f"{name}.json").exists()]


def forget_old_judgement(work: Path) -> None:
    """Removes scores that lack a server which has written its outputs since."""
    scored = side_by_side.load(work, JUDGE)
    if scored is not None and list(scored["scores"]) != available(work):
        (work / f"{JUDGE}.json").unlink()


def stopped_row(name: str, work: Path) -> dict[str, Any] | None:
    """How a server ended that had to stop; None where it was not run to its end."""
    run, log = side_by_side.load(work, name), work / f"{name}.log"
    if run is None:
        return None
    row = tp_verdicts.stop(STOPS_BY[name], run, log.read_text(errors="replace") if log.exists() else "")
    return {**row, "ok": row["ok"] and row.get("step") in (None, str(DIFFERING_STEP))}


def forget_wrong_stops(work: Path) -> None:
    """Removes the results of servers that did not stop as they must: they are tried again."""
    for name in STOPPING:
        row = stopped_row(name, work)
        if row is not None and not row["ok"]:
            (work / f"{name}.json").unlink()


def rows_of_report(work: Path) -> list[dict[str, Any]]:
    """All that the stage concludes from the files in `work`."""
    found = {name: side_by_side.load(work, name) for name in (*SERVERS, JUDGE, *GPUS)}
    logs = {name: work / f"{name}.log" for name in SERVERS}
    texts = {name: path.read_text(errors="replace") if path.exists() else "" for name, path in logs.items()}
    rows: list[dict[str, Any]] = []
    for name in FORCED:
        scored = (found[JUDGE] or {}).get("scores", {}).get(name)
        if found[name] is None or scored is None:
            rows.append({"server": name, "ok": False, "missing": "it wrote nothing, or was not judged"})
        else:
            rows.append(forced_row(name, found[name], scored, found[JUDGE]["margin"], texts[name]))
    for ours, theirs in LIKE.items():
        pair = found[ours], found[theirs]
        row: dict[str, Any] = {"ok": False, "missing": "a server wrote nothing"}
        if pair[0] and pair[1]:
            row = tp_verdicts.acceptance(pair[0]["rows"], pair[1]["rows"])
        rows.append({"acceptance": ours, "like": theirs, **row})
    rows.append(checked_row(found[CHECKED], texts[CHECKED]))
    for name in STOPPING:
        row = stopped_row(name, work) or {"ok": False, "missing": "it was not run to its end"}
        rows.append({"must_stop": name, **row})
    timed = [row for gpu in GPUS for row in (found[gpu] or {"rows": []})["rows"]]
    rows += tp_verdicts.attention(timed, half_heads.WHOLE, half_heads.SHARE, half_heads.AT_MOST)
    rows += [{"attention": gpu, "ok": False, "missing": "not timed"} for gpu in GPUS if found[gpu] is None]
    return rows


def forced_row(name: str, data: dict[str, Any], scored: dict[str, Any], margin: float, log: str) -> dict[str, Any]:
    """How far a tp 2 server's tokens stray from what the target at tp 1 prefers."""
    misses, how, right = scored["deficits"], tp_verdicts.about(log), name != WRONG
    beyond = sum(miss > margin for miss in misses)
    same = data["ranks"] == 2 and data["differing"] == data["unlike_answers"] == 0
    captured = how["graph_replays"] > 0 and how["without_graph"] == 0
    return {
        "server": name, **{key: value for key, value in scored.items() if key != "deficits"}, "beyond_margin": beyond,
        "must_be_right": right, "requests_that_ranks_end_differently": data["differing"], **how,
        "seconds": data["seconds"], "ok": (beyond == 0) == right and same and captured,
    }  # fmt: skip


def checked_row(data: dict[str, Any] | None, log: str) -> dict[str, Any]:
    """Sampled requests at tp 2 whose trees were compared every step."""
    if data is None:
        return {"server": CHECKED, "ok": False, "missing": "it wrote nothing: its log says why"}
    full = sum(len(row["output"]) == SAMPLED_TOKENS for row in data["rows"])
    steps = sum(len(row["growth"]) for row in data["rows"])
    same = data["ranks"] == 2 and data["differing"] == data["unlike_answers"] == 0
    return {
        "server": CHECKED, "requests": len(data["rows"]), "of_full_length": full, "different_outputs":
        len({json.dumps(row["output"]) for row in data["rows"]}), "steps_of_requests": steps,
        "tokens_per_step": full * (SAMPLED_TOKENS - 1) / max(steps, 1),
        "requests_that_ranks_end_differently": data["differing"], **tp_verdicts.about(log),
        "seconds": data["seconds"], "ok": same and full == len(data["rows"]) == SAMPLED,
    }  # fmt: skip


def main() -> None:
    args = side_by_side.arguments(__doc__, [*SERVERS, JUDGE, *GPUS], 20000, "--unwatched")
    options = ["--target", str(args.target), "--draft", str(args.draft)]
    if args.serve in GPUS:
        gpu = GPUS.index(args.serve)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # nothing has looked at the GPUs before
        rows = half_heads.measure(gpu)
        print(*map(json.dumps, rows), sep="\n", flush=True)
        if all("us" in row for row in rows):
            side_by_side.save(args.work, args.serve, {"rows": rows})
    elif args.serve == JUDGE:
        judge(args.target, args.work, args.port)
    elif args.serve in STOPPING and not args.unwatched:
        watch_it_stop(args.serve, options, args.work, args.port)
    elif args.serve:
        serve(args.serve, args.target, args.draft, args.work, args.port)
    else:
        run(args, options)


def run(args: argparse.Namespace, options: list[str]) -> None:
    """All parts that have no result yet, and the report."""
    import torch

    begin = time.monotonic()
    if torch.cuda.device_count() < 2:
        print(f"two_gpus: needs two GPUs, there are {torch.cuda.device_count()}; nothing was run", flush=True)
        sys.exit(TOO_FEW_GPUS)
    os.environ.update(NO_MULTICAST)

    def part(names: list[str], port: int, limit_s: float) -> None:
        left = BUDGET_S - (time.monotonic() - begin)
        side_by_side.run(__file__, names, args.work, options, port, min(limit_s, left))
        print(f"{', '.join(names)}: {time.monotonic() - begin:.0f} s by now", flush=True)

    forget_wrong_stops(args.work)
    part(list(GPUS), args.port, ATTENTION_S)
    part(list(FORCED), args.port, SPECULATING_S)
    forget_old_judgement(args.work)
    part([JUDGE, *OTHERS], args.port + 3000, BUDGET_S)
    scored = side_by_side.load(args.work, JUDGE) or {}
    more = {name: scored.get(name) for name in ("gap", "margin")}
    report.write(args.out, rows_of_report(args.work), gpus=torch.cuda.device_count(), **more)
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
