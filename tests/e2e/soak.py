# SPDX-License-Identifier: Apache-2.0
"""Servers under load for at least 20 minutes and 5000 requests, in pieces that resume.

    python3 tests/e2e/soak.py --target DIR --draft DIR --work DIR --out OUT/soak.json --budget-s 460

Servers are started as users start them and asked over HTTP, all of them side by side: `python -m sglang.launch_server`
with a radix cache, CUDA graphs for batches of 1 to 32, and a pool that holds few of the prompts that were served.
In a wave so many clients send one request after the other: prompts of 16 to 65536 tokens, some with a common beginning,
streamed or not, greedy or sampled, with stop strings, left in mid-stream or aborted by name; every fifth wave is
SGLang's own bench_serving. The number of clients changes from wave to wave.

After a wave the scheduler must come to rest with every slot free or cached exactly once, no row of logits may have held
a NaN, the log must not complain, and the memory at rest must not grow. Greedy outputs, some of every wave, whose token
ids the scheduler wrote down, are scored by the target alone, with judge.py's margin; a server whose mask is dropped
must go beyond it. A piece that is cut off resumes with the wave it was in, on a machine with the same card, OUT and
work folder. Exit 3: not all waves have run, or not all outputs are judged; run it again. A wave that failed stays so:
to begin anew remove OUT with .jsonl for .json, and the work folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scripts")]

import report  # noqa: E402
import soak_client as client  # noqa: E402
import soak_traffic as traffic  # noqa: E402
import soak_verdict as verdict  # noqa: E402
from bench.ddtree import models  # noqa: E402
from bench.store import Store  # noqa: E402
from modes import MODES, engine_arguments  # noqa: E402
from side_by_side import PORTS  # noqa: E402
from soak_server import Server  # noqa: E402

OUT_OF_TIME = 3
WAVE_S, WAVES, CONTROL_WAVES = 20.0, 60, 2
CLIENTS = (32, 1, 8, 2, 16, 4, 24, 3, 32, 12, 6)
"""In turn; eleven of them, so that bench_serving, every fifth wave, meets each."""

BENCH_EVERY, BENCH_PROMPTS = 5, 60
BUCKETS = [1, 2, 4, 8, 16, 24, 32]
START_S, REST_S, JUDGE_S = 150, 30, 150
"""Seconds for a start; for the end of a wave and a stop; for the judge."""

KEY = ("server", "wave", "card", "build")
KEPT = 12
"""Greedy outputs a wave that are judged."""


@dataclass(frozen=True)
class Soaked:
    """A server under load. `right`: its greedy outputs must be the target's; else they must visibly not be."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    lengths: traffic.Lengths = traffic.MIXED
    trained: bool = True
    """Else random weights of a large model's attention geometry, see bench/ddtree/models.py."""
    right: bool = True
    waves: int = WAVES
    pool: int = 400_000
    """Slots of its KV pool: the cache of earlier prompts is evicted all the time."""


SERVERS = {
    "ddtree": Soaked(MODES["ddtree"].arguments),
    "ddtree_triton": Soaked(MODES["ddtree_triton"].arguments),
    "ngram": Soaked(MODES["ngram"].arguments),
    "ddtree_long": Soaked(MODES["ddtree"].arguments, lengths=traffic.LONG, trained=False, pool=1_200_000),
    "ddtree_mask_dropped": Soaked(
        MODES["ddtree"].arguments, MODES["ddtree_mask_dropped"].environment, right=False, waves=CONTROL_WAVES
    ),
}
ROOM: dict[str, Any] = {
    "skip_tokenizer_init": False, "disable_radix_cache": False, "cuda_graph_bs": BUCKETS, "cuda_graph_max_bs": 32,
    "max_running_requests": 32, "context_length": traffic.LONGEST + 4096,
    "schedule_conservativeness": 0.3, "mem_fraction_static": 0.8, "enable_cache_report": True,
}  # fmt: skip
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


@dataclass(frozen=True)
class Folders:
    """Where models are and results go."""

    target: Path
    draft: Path
    work: Path

    def models(self, soaked: Soaked) -> tuple[Path, Path]:
        """Target and drafter of a server."""
        if soaked.trained:
            return self.target, self.draft
        return models.write(self.work / "random_weights", vocabulary=vocabulary(self.target), dense=True)

    def answers(self, name: str) -> Path:
        """Greedy outputs of a server, to be judged."""
        return self.work / f"{name}.answers.jsonl"

    def scores(self, name: str) -> Path:
        """What the target says about them."""
        return self.work / f"{name}.scores.json"


def vocabulary(target: Path) -> int:
    """Of a model's folder."""
    return int(json.loads((target / "config.json").read_text())["vocab_size"])


def arguments_of(soaked: Soaked, folders: Folders, port: int) -> dict[str, Any]:
    """Of the server; with random weights the trained target's tokenizer serves."""
    target, draft = folders.models(soaked)
    own = {**ROOM, "max_total_tokens": soaked.pool, **soaked.arguments}
    if not soaked.trained:
        own |= {"load_format": "dummy", "tokenizer_path": str(folders.target)}
    return engine_arguments(target, draft, port=port, nccl_port=port + 50, **own)


async def serve_wave(
    server: Server, http: Any, text: traffic.Text, soaked: Soaked, number: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One wave.

    Returns:
        Its counts and faults, and the greedy outputs to be judged.
    """
    clients = CLIENTS[number % len(CLIENTS)]
    if number % BENCH_EVERY == BENCH_EVERY - 1 and soaked.right:
        return await bench_serving(server, clients, number), []

    def draw(who: int, nth: int) -> traffic.Ask:
        return traffic.draw(text, soaked.lengths, f"{server.name}-{number}-{who}-{nth}")

    answered = await client.wave(http, server.url, server.model, draw, clients, WAVE_S)
    faults = [f"{ask.rid}: {fault}" for ask, answer in answered if (fault := client.fault(ask, answer))]
    outputs, greedy = server.outputs(), []
    for ask, answer in answered:
        if ask.complete and ask.temperature == 0 and not answer.error and ask.rid in outputs:
            greedy.append({"rid": ask.rid, "output": outputs[ask.rid]})
    return {"clients": clients, "counts": dict(count(answered)), "faults": faults}, greedy[:KEPT]


def count(answered: Sequence[tuple[traffic.Ask, client.Answer]]) -> Counter[str]:
    """How many requests were what."""
    counts: Counter[str] = Counter()
    for ask, answer in answered:
        done = answer.finish in ("stop", "length")
        counts["complete"] += done
        counts["stopped"] += ask.stop is not None and answer.finish == "stop"
        counts["left"] += answer.left
        counts["aborted"] += answer.finish == "abort"
        counts["cached_tokens"] += answer.cached_tokens
        counts["streamed"] += done and ask.stream
        counts["sampled" if ask.temperature else "greedy"] += done
        counts["new_tokens"] += answer.new_tokens or 0
    return counts


async def bench_serving(server: Server, clients: int, number: int) -> dict[str, Any]:
    """A wave of SGLang's own client."""
    out = server.log.with_name(f"{server.name}.bench.jsonl")
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--base-url", server.url, "--model",
        server.model, "--tokenizer", server.tokenizer, "--dataset-name", "random-ids", "--num-prompts",
        str(BENCH_PROMPTS), "--random-input-len", "1024", "--random-output-len", "128", "--random-range-ratio", "0.1",
        "--max-concurrency", str(clients), "--seed", str(number), "--output-file", str(out), "--disable-tqdm",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = await process.communicate()
    result = json.loads(out.read_text().splitlines()[-1]) if out.exists() else {}
    done = int(result.get("completed", 0))
    faults = [] if done == BENCH_PROMPTS else [f"bench_serving: {done} of {BENCH_PROMPTS}: {said.decode()[-600:]}"]
    counts = {"complete": done, "streamed": done, "greedy": done, "new_tokens": result.get("total_output_tokens", 0)}
    return {"clients": clients, "bench_serving": True, "counts": counts, "faults": faults}


async def load(
    server: Server, soaked: Soaked, text: traffic.Text, folders: Folders, store: Store, label: dict[str, Any],
    deadline: float,
) -> None:  # fmt: skip
    """The waves that a server lacks, until the deadline; each adds a row to the store."""
    piece, told = round(time.time()), len(server.complaints())
    async with client.session() as http:
        for number in range(soaked.waves):
            row = {**label, "server": server.name, "wave": number}
            if store.done(row):
                continue
            if time.time() + WAVE_S + REST_S > deadline:
                return
            begin = time.time()
            found, greedy = await serve_wave(server, http, text, soaked, number)
            try:
                pool = await asyncio.to_thread(server.watch.idle)
            except AssertionError as error:
                pool, found["faults"] = None, [*found["faults"], str(error)]
            complaints = server.complaints()[told:]
            told += len(complaints)
            with folders.answers(server.name).open("a") as file:
                file.writelines(json.dumps(answer) + "\n" for answer in greedy)
            row |= {**found, "faults": found["faults"][:5], "fault_count": len(found["faults"]), "pool": pool}
            row |= {"complaints": complaints[:5], "piece": piece}
            row |= {"begin": round(begin, 2), "end": round(time.time(), 2)}
            store.add(row | {"ok": verdict.wave_ok(row)})
            print(json.dumps({k: row[k] for k in ("server", "wave", "clients", "counts", "faults")}), flush=True)
            if not server.running():
                print(f"{server.name} is gone:", *server.tail(25), sep="\n", flush=True)
                return
        if not server.flush():
            print(f"{server.name} did not flush its cache", flush=True)


def run_waves(
    wanted: dict[str, Soaked], folders: Folders, store: Store, label: dict[str, Any], port: int, deadline: float
) -> None:
    """Starts the servers, loads them all at once, and stops them."""
    text, started = traffic.Text.held_out(folders.target), {}
    try:
        for i, (name, soaked) in enumerate(wanted.items()):
            own = arguments_of(soaked, folders, port + i * PORTS)
            started[name] = Server(name, folders.work, own, {**STRICT, **soaked.environment})
        end, waiting = min(time.time() + START_S, deadline), dict(started)
        while waiting and time.time() < end:
            waiting = {name: server for name, server in waiting.items() if not server.ready()}
            time.sleep(1)
        for name, server in waiting.items():
            print(f"{name} did not start within {START_S} s:", *server.tail(25), sep="\n", flush=True)

        async def all_of_them() -> None:
            loads = [load(server, wanted[name], text, folders, store, label, deadline)
                     for name, server in started.items() if name not in waiting]  # fmt: skip
            await asyncio.gather(*loads)

        asyncio.run(all_of_them())
    finally:
        for server in started.values():
            server.stop()


def label_here() -> dict[str, Any]:
    """The card and the build that a row belongs to."""
    from bench.ddtree.modes import tree
    from bench.ddtree.rows import build
    from sglang.srt.treeverify.selftest import environment

    return {"card": environment()["card"], "build": build(tree(16))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="the MLA target")
    parser.add_argument("--draft", type=Path, required=True, help="its drafter")
    parser.add_argument("--work", type=Path, required=True, help="folder for models, outputs and logs")
    parser.add_argument("--out", type=Path, required=True, help="results file; its rows are kept beside it, as .jsonl")
    parser.add_argument("--servers", default=",".join(SERVERS), help="default: %(default)s")
    parser.add_argument("--budget-s", type=float, default=460, help="end cleanly before so many seconds")
    parser.add_argument("--port", type=int, default=35000)
    args = parser.parse_args(argv)
    deadline, begin = time.time() + args.budget_s - 15, time.time()
    folders = Folders(args.target.resolve(), args.draft.resolve(), args.work.resolve())
    chosen = {name: SERVERS[name] for name in args.servers.split(",")}
    folders.work.mkdir(parents=True, exist_ok=True)
    store, label = Store(args.out, KEY), label_here()
    wanted = {name: soaked for name, soaked in chosen.items() if lacking(store, label, name, soaked)}
    if wanted:
        run_waves(wanted, folders, store, label, args.port, deadline)
    open_waves = any(lacking(store, label, name, soaked) for name, soaked in chosen.items())
    if not open_waves and time.time() + JUDGE_S < deadline:
        judge_all(chosen, folders, args.port)
    judged = finish(args.out, store, label, chosen, folders)
    print(f"{time.time() - begin:.0f} s", flush=True)
    if open_waves or not judged:
        print("not all of it: run it again to go on", flush=True)
        return OUT_OF_TIME
    return 0 if json.loads(args.out.read_text())["ok"] else 1


def lacking(store: Store, label: dict[str, Any], name: str, soaked: Soaked) -> bool:
    """Whether waves of a server have not run."""
    return any(not store.done({**label, "server": name, "wave": number}) for number in range(soaked.waves))


def judge_all(chosen: dict[str, Soaked], folders: Folders, port: int) -> None:
    """Scores the outputs of all servers that have none yet, by the two targets side by side."""
    script, judges = str(Path(__file__).with_name("soak_judge.py")), {}
    for kind, trained in (("trained", True), ("random", False)):
        names = [name for name, soaked in chosen.items() if soaked.trained == trained]
        names = [name for name in names if not folders.scores(name).exists() and folders.answers(name).exists()]
        if names:
            command = [sys.executable, script, "--servers", ",".join(names), "--target", str(folders.target),
                       "--draft", str(folders.draft), "--work", str(folders.work), "--port", str(port)]  # fmt: skip
            with (folders.work / f"judge-{kind}.log").open("wb") as log:
                judges[", ".join(names)] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            port += PORTS
    for names_of, judge in judges.items():
        print(f"judged {names_of}: exit {judge.wait()}", flush=True)


def finish(out: Path, store: Store, label: dict[str, Any], chosen: dict[str, Soaked], folders: Folders) -> bool:
    """Writes the report; returns whether the outputs of all servers are judged."""
    kept = [row for row in store.rows.values() if all(row[key] == label[key] for key in label)]
    rows: list[dict[str, Any]] = []
    judged = True
    for name, soaked in chosen.items():
        own = [row for row in kept if row["server"] == name]
        rows.append(verdict.server(name, own, soaked.right, soaked.waves))
        path = folders.scores(name)
        judged = judged and path.exists()
        if path.exists():
            scores = json.loads(path.read_text())
            rows.append({"server": name, **scores, "ok": (scores["beyond_margin"] == 0) == soaked.right})
    served = [row for row in kept if row["server"] in chosen]
    report.write(out, [*served, *rows, verdict.whole(served)], wave_s=WAVE_S, buckets=BUCKETS)
    return judged


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
