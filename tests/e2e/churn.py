# SPDX-License-Identifier: Apache-2.0
"""The pool's accounting stays exact whatever happens to DDTREE's requests, and what they are served stays right.

    python3 tests/e2e/churn.py --target DIR --draft DIR --work DIR --out OUT/churn.json

Waves of requests against servers with a radix cache, a pool that is too small for them and graph buckets 1, 2, 4, 8:
lengths that end at different times, prefixes shared with earlier requests, stop tokens inside an accepted path,
greedy and sampled requests with penalties and biases in one batch, aborts half-way, retraction. After every step
SGLang checks that free, cached and held slots are all there are (SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY); after
every wave free and cached slots together must be every slot of the pool exactly once, and after a flush all be free.
In float32 on Triton greedy outputs must equal those of the same requests served alone before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import report  # noqa: E402
import side_by_side  # noqa: E402
from lossless import EXACT, FLOAT32, Server  # noqa: E402
from modes import ADAPT, DDTREE, WIDE, engine_arguments, spec_v2  # noqa: E402
from scheduler_hooks import WATCH, engine  # noqa: E402
from serve import prompts  # noqa: E402
from watch import Watch  # noqa: E402

LIMIT_S = 330
LONG, LONGER, POOL = 200, 420, 2600
"""New tokens of a long and of a longer request; slots of the pool: eight longer requests need 4560."""
BUCKETS = [1, 2, 4, 8]
SHORT_PROMPT = 150
EOS = 1
"""The target's end of text."""
_STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
_DFLASH = {key: value for key, value in DDTREE.items() if key != "speculative_num_draft_tokens"}
SERVERS = {
    "float32": Server("mla", {**FLOAT32, **DDTREE}, ("native", "watch"), {**EXACT, **_STRICT}),
    "pages": Server("mla", {**FLOAT32, **DDTREE, "page_size": 16}, ("native", "watch"), {**EXACT, **_STRICT}),
    "bf16": Server("mla", DDTREE, ("watch",), _STRICT),
    "bf16_pages": Server("mla", {**DDTREE, "page_size": 16}, ("watch",), _STRICT),
    "widths": Server(
        "mla", {**DDTREE, "speculative_num_draft_tokens": WIDE}, ("watch", "alternate"), {**ADAPT, **_STRICT}
    ),
    "dflash": Server("mla", {**_DFLASH, "speculative_algorithm": "DFLASH"}, ("watch",), _STRICT),
}
OURS = ("float32", "pages", "bf16", "bf16_pages", "widths")
"""The last is SGLang's own DFLASH, to tell its faults from ours; its row decides nothing."""
V2 = ("bf16", "bf16_pages", "dflash")
"""Servers that releases of spec v2 have: DDTREE there has no float32, and does not adapt its trees."""


def here() -> list[str]:
    """The servers of this release; bf16_pages stands in where float32 has no pages."""
    v2 = spec_v2()
    return [name for name in SERVERS if (name in V2 if v2 else name != "bf16_pages")]


SMALL: dict[str, Any] = {
    "disable_radix_cache": False, "cuda_graph_bs": BUCKETS, "cuda_graph_max_bs": 8, "max_running_requests": 8,
    "max_total_tokens": POOL, "context_length": 2048, "schedule_conservativeness": 0.2, "mem_fraction_static": 0.7,
}  # fmt: skip


class Bench:
    """One server and what its requests are served alone."""

    def __init__(self, started: Any, inputs: list[list[int]], watch: Path) -> None:
        self.engine, self.inputs, self.watch = started, inputs, Watch(watch)
        self.alone = [self.ask([prompt], [{"max_new_tokens": LONG}])[0]["output_ids"] for prompt in inputs]

    def ask(self, inputs: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answers; greedy to the full length unless a request says otherwise."""
        base = {"temperature": 0.0, "ignore_eos": True}
        return self.engine.generate(input_ids=inputs, sampling_params=[{**base, **own} for own in sampling])

    def idle(self) -> dict[str, Any]:
        """The pools once the scheduler has come to rest; AssertionError where it does not."""
        return self.watch.idle()

    def differing(self, answers: list[dict[str, Any]], expected: list[list[int]]) -> int:
        """Outputs that are not what is expected."""
        return sum(answer["output_ids"] != want for answer, want in zip(answers, expected, strict=True))


def mislengthed(answers: list[dict[str, Any]], sizes: list[int]) -> int:
    """Outputs that have not as many tokens as asked for."""
    return sum(len(answer["output_ids"]) != size for answer, size in zip(answers, sizes, strict=True))


Wave = Callable[[Bench], dict[str, Any]]
"""Serves requests; returns what it found: `wrong`, outputs that are not those served alone (bf16's may differ by
rounding); `broken`, outputs that no rounding excuses; `shown`, whether what the wave is about happened at all."""


def lengths(bench: Bench) -> dict[str, Any]:
    """Requests that end one after the other: the batch shrinks through and inside the buckets."""
    sizes = [3 + 11 * i % 97 for i in range(16)]
    chosen = [i % len(bench.inputs) for i in range(16)]
    answers = bench.ask([bench.inputs[i] for i in chosen], [{"max_new_tokens": size} for size in sizes])
    wrong = bench.differing(answers, [bench.alone[i][:size] for i, size in zip(chosen, sizes, strict=True)])
    return {"wrong": wrong, "broken": mislengthed(answers, sizes), "shown": len(set(sizes)) > 8}


def prefixes(bench: Bench) -> dict[str, Any]:
    """Prompts that go on where earlier outputs ended, or were: their KV and the drafter's come from the cache."""
    bench.ask(bench.inputs[:4], [{"max_new_tokens": 60}] * 4)
    cuts = [20, 33, 47, 60]
    inputs = [bench.inputs[i] + bench.alone[i][:cut] for i, cut in enumerate(cuts)]
    answers = bench.ask(inputs, [{"max_new_tokens": 40}] * 4)
    cached = [answer["meta_info"].get("cached_tokens", 0) for answer in answers]
    wrong = bench.differing(answers, [bench.alone[i][cut : cut + 40] for i, cut in enumerate(cuts)])
    broken = mislengthed(answers, [40] * 4)
    return {"wrong": wrong, "broken": broken, "cached_tokens": cached, "shown": min(cached) > SHORT_PROMPT // 2}


def stops(bench: Bench) -> dict[str, Any]:
    """A token that the request is going to write ends it, wherever in a path it stands."""
    chosen = [i % len(bench.inputs) for i in range(12)]
    ends = [bench.alone[i][12 + 3 * nth] for nth, i in enumerate(chosen)]
    sampling = [{"max_new_tokens": LONG, "ignore_eos": False, "stop_token_ids": [end]} for end in ends]
    answers = bench.ask([bench.inputs[i] for i in chosen], sampling)
    wrong = broken = stopped = 0
    for i, end, answer in zip(chosen, ends, answers, strict=True):
        output, text = answer["output_ids"], bench.alone[i]
        until = min(text.index(token) for token in (end, EOS) if token in text)
        wrong += output != text[: until + 1]
        broken += any(token in output[:-1] for token in (end, EOS))
        stopped += answer["meta_info"]["finish_reason"]["type"] == "stop"
    return {"wrong": wrong, "broken": broken, "stopped": stopped, "shown": stopped > len(answers) // 2}


def mixed(bench: Bench) -> dict[str, Any]:
    """Greedy requests among sampled, penalised and biased ones in the same batches. Spec v2 has no penalties."""
    penalties = {} if spec_v2() else {"frequency_penalty": 0.7, "presence_penalty": 0.5}
    banned = [bench.alone[i][0] for i in range(len(bench.inputs))]
    inputs, sampling = [], []
    for i in range(len(bench.inputs)):
        kinds: list[dict[str, Any]] = [
            {}, {"temperature": 1.0}, dict([*penalties.items()][:1]), {"logit_bias": {str(banned[i]): -100.0}},
            {"temperature": 0.8, "top_k": 20, **dict([*penalties.items()][1:])},
        ]  # fmt: skip
        inputs += [bench.inputs[i]] * len(kinds)
        sampling += [{"max_new_tokens": 40 + 3 * k, **kind} for k, kind in enumerate(kinds)]
    answers = bench.ask(inputs, sampling)
    wrong = bench.differing(answers[::5], [text[:40] for text in bench.alone])
    biased = sum(token in answer["output_ids"] for token, answer in zip(banned, answers[3::5], strict=True))
    broken = biased + mislengthed(answers, [own["max_new_tokens"] for own in sampling])
    sampled = bench.differing(answers[1::5], [text[:43] for text in bench.alone])
    return {"wrong": wrong, "broken": broken, "banned_tokens_written": biased, "shown": sampled > 0}


def aborts(bench: Bench) -> dict[str, Any]:
    """Every other request is aborted while it runs or waits; the others must not notice."""
    count = 12
    chosen = [i % len(bench.inputs) for i in range(count)]

    async def one(i: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": LONG}
        try:
            return await bench.engine.async_generate(
                input_ids=bench.inputs[chosen[i]], sampling_params=sampling, rid=f"abort-{i:02d}-{time.monotonic()}"
            )
        except Exception as error:  # an aborted request may raise
            return {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": str(error)}}}

    async def all_of_them() -> list[dict[str, Any]]:
        tasks = [asyncio.ensure_future(one(i)) for i in range(count)]
        await asyncio.sleep(0.35)
        manager = bench.engine.tokenizer_manager
        for rid in [rid for rid in manager.rid_to_state if rid.startswith("abort-")]:
            if int(rid.split("-")[1]) % 2:
                manager.abort_request(rid)
                await asyncio.sleep(0.02)
        return list(await asyncio.gather(*tasks))

    answers = bench.engine.loop.run_until_complete(all_of_them())
    wrong = bench.differing(answers[::2], [bench.alone[i] for i in chosen[::2]])
    cut = sum(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers[1::2])
    broken = mislengthed(answers[::2], [LONG] * (count // 2))
    return {"wrong": wrong, "broken": broken, "aborted": cut, "shown": cut > 0}


def retraction(bench: Bench) -> dict[str, Any]:
    """More than the pool holds: some requests are retracted, prefilled again, and end as if nothing had happened."""
    chosen = [i % len(bench.inputs) for i in range(16)]
    answers = bench.ask([bench.inputs[i] for i in chosen], [{"max_new_tokens": LONGER}] * 16)
    counts = [answer["meta_info"].get("num_retractions", 0) for answer in answers]
    pairs = zip(answers, chosen, strict=True)
    wrong = sum(answer["output_ids"][:LONG] != bench.alone[i] for answer, i in pairs)
    broken = mislengthed(answers, [LONGER] * 16)
    return {"wrong": wrong, "broken": broken, "retractions": sum(counts), "shown": sum(counts) > 0}


WAVES: list[Wave] = [lengths, prefixes, stops, mixed, aborts, retraction, lengths]


def serve(name: str, target: Path, draft: Path, work: Path, port: int) -> None:
    """Runs the waves against one server and saves what was found, however far it came."""
    server, watch = SERVERS[name], work / f"{name}.watch.jsonl"
    watch.unlink(missing_ok=True)
    os.environ.update({**server.environment, WATCH: str(watch)})
    if server.arguments.get("dtype") == "float32":
        os.environ["TRITON_CACHE_DIR"] = str(work / "triton_float32")
    inputs = [prompt for prompt in prompts(target) if len(prompt) == SHORT_PROMPT]
    arguments = {"port": port, "nccl_port": port + 50, **SMALL, **server.arguments}
    started = engine(server.hooks, engine_arguments(target, draft, **arguments))
    bench, waves = Bench(started, inputs, watch), []
    for number, wave in enumerate([None, *WAVES]):
        begin = time.time()
        found = wave(bench) if wave else {"wrong": 0, "broken": 0, "shown": True}
        found["pool"] = bench.idle()
        found["seconds"] = round(time.time() - begin, 1)
        waves.append({"wave": f"{number} {wave.__name__ if wave else 'alone'}", **found})
        print(json.dumps(waves[-1]), flush=True)
    flushed = started.flush_cache().success
    side_by_side.save(work, name, {"waves": waves, "flushed": flushed, "after": bench.idle()})
    started.shutdown()


def exact_pool(pool: dict[str, Any]) -> bool:
    """Every slot free or cached exactly once, every row of req_to_token free."""
    return pool["each_once"] and pool["free"] + pool["cached"] == pool["total"] and pool["rows_free"] == pool["rows"]


def judge(name: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every wave, and one for the flush, which also says whether batches shrank inside a bucket."""
    rows: list[dict[str, Any]] = []
    for wave in data["waves"]:
        # in bf16 a request's neighbours change its rounding, so that outputs may differ; equality is float32's to show
        right = wave["wrong"] == 0 or name not in ("float32", "pages")
        right = right and wave["broken"] == 0 and wave["shown"]
        rows.append({"server": name, **wave, "ok": right and exact_pool(wave["pool"])})
    after = data["after"]
    free = exact_pool(after) and after["free"] == after["total"]
    inside = bool(set(after["batch_sizes"]) - set(BUCKETS))
    rows.append({"server": name, "wave": "flush", "pool": after, "ok": data["flushed"] and free and inside})
    if name not in OURS:
        for row in rows:
            row["would_be_ok"] = row.pop("ok")
    return rows


def main() -> None:
    args = side_by_side.arguments(__doc__, SERVERS, 27000)
    if args.serve:
        serve(args.serve, args.target, args.draft, args.work, args.port)
        return
    options = ["--target", str(args.target), "--draft", str(args.draft)]
    served = here()
    side_by_side.run(__file__, served, args.work, options, args.port, LIMIT_S)
    rows: list[dict[str, Any]] = []
    for name in served:
        data = side_by_side.load(args.work, name)
        if data is not None:
            rows += judge(name, data)
        elif name in OURS:
            rows.append({"server": name, "ok": False, "missing": "it ended early: its log says why"})
    report.write(args.out, rows, pool=POOL, new_tokens=LONG)
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
