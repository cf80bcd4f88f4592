# SPDX-License-Identifier: Apache-2.0
"""The soak's traffic, its client, and what it concludes, against a small HTTP server. No GPU, no SGLang."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

aiohttp = pytest.importorskip("aiohttp")  # it comes with SGLang
import soak  # noqa: E402
import soak_client as client  # noqa: E402
import soak_judge  # noqa: E402
import soak_server  # noqa: E402
import soak_traffic as traffic  # noqa: E402
import soak_verdict as verdict  # noqa: E402
from aiohttp import web  # noqa: E402
from bench.store import Store  # noqa: E402

TEXT = traffic.Text([7 + i % 1000 for i in range(2 * traffic.LONGEST)], 0)
POOL = {
    "total": 10, "free": 6, "cached": 4, "each_once": True, "rows": 8, "rows_free": 8, "nan_rows": 0, "retracted": 1,
    "batch_sizes": [1, 2, 3, 4, 5, 6, 7, 31], "allocated": 1000, "reserved": 2000,
}  # fmt: skip


def drawn(count: int) -> list[traffic.Ask]:
    return [traffic.draw(TEXT, traffic.MIXED, f"x-0-0-{i}") for i in range(count)]


def test_requests_are_of_every_kind_and_the_same_every_time() -> None:
    asks = drawn(400)
    assert asks[:20] == drawn(20)
    for share, of_kind in (
        (traffic.STOPPED, [ask.stop for ask in asks]),
        (traffic.LEFT, [ask.leave_after for ask in asks]),
        (traffic.ABORTED, [ask.abort_after for ask in asks]),
    ):
        assert 0.4 * share < sum(value is not None for value in of_kind) / len(asks) < 2 * share
    assert {ask.temperature for ask in asks} == {0.0, 1.0} and {ask.stream for ask in asks} == {True, False}
    lengths = [len(ask.prompt) for ask in asks]
    assert min(lengths) >= 16 and max(lengths) <= traffic.LONGEST and min(lengths) < 40 and max(lengths) > 30000
    assert all(traffic.NEW_TOKENS[0] <= ask.new_tokens <= traffic.NEW_TOKENS[1] for ask in asks)
    assert {ask.prompt[0] for ask in asks} == {0}


def test_some_prompts_begin_alike() -> None:
    beginnings = [tuple(ask.prompt[:8]) for ask in drawn(100)]
    shared = sum(a == b for a, b in itertools.combinations(beginnings, 2))
    assert shared > 20


Reply = Callable[[web.Request, dict[str, Any]], Any]


async def served(reply: Reply, use: Callable[[aiohttp.ClientSession, str], Any]) -> Any:
    """What `use` returns while a server answers /v1/completions by `reply`; it may return a response or SSE events."""
    aborted: list[str] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        events = reply(request, body)
        if isinstance(events, web.Response):
            return events
        if not body["stream"]:
            return web.json_response(events[-1])
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.01)
            if body["rid"] in aborted:
                await response.write(b'data: {"choices": [{"text": "", "finish_reason": "abort"}]}\n\n')
                break
        if not isinstance(events[-1], bytes):
            await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(request: web.Request) -> web.Response:
        aborted.append((await request.json())["rid"])
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.post("/abort_request", abort)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with client.session() as http:
            return await use(http, f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()


def right(request: web.Request, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As SGLang answers: streamed in chunks and then the usage, or all at once."""
    tokens, stop = body["max_tokens"], body.get("stop")
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens, "prompt_tokens_details": None}
    end = {"finish_reason": "stop" if stop else "length"}
    whole = {"choices": [{"text": "a" * tokens, **end}], "usage": usage}
    chunks = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(tokens - 1)]
    last = [{"choices": [{"text": "a", **end}]}, {"choices": [], "usage": usage}]
    return [*chunks, *last] if body["stream"] else [whole]


ASK = traffic.Ask("r", [0, 1, 2], 12, 0.0, True, None, None, None, False)


def answer_to(ask: traffic.Ask, reply: Reply) -> client.Answer:
    return asyncio.run(served(reply, lambda http, url: client.ask(http, url, "m", ask)))


@pytest.mark.parametrize(
    "ask",
    [ASK, ASK._replace(stream=False), ASK._replace(stop="b"), ASK._replace(leave_after=3), ASK._replace(abort_after=3)],
)
def test_right_answers_have_no_fault(ask: traffic.Ask) -> None:
    answer = answer_to(ask, right)
    assert client.fault(ask, answer) is None
    assert answer.left == (ask.leave_after is not None)
    assert (answer.finish == "abort") == (ask.abort_after is not None)
    assert answer.text == "a" * (12 if ask.complete else answer.chunks - (answer.finish == "abort"))


def changed(**usage: int) -> Reply:
    def reply(request: web.Request, body: dict[str, Any]) -> list[dict[str, Any]]:
        events = right(request, body)
        events[-1]["usage"] |= usage
        return events

    return reply


@pytest.mark.parametrize(
    ("ask", "reply", "words"),
    [
        (ASK, changed(completion_tokens=11), "11 of 12 tokens"),
        (ASK._replace(stream=False), changed(prompt_tokens=4), "counted as 4"),
        (ASK, lambda request, body: [*right(request, body)[:3], b"data: {\n\n"], "JSONDecodeError"),
        (ASK, lambda request, body: [*right(request, body)[:3], b""], "without [DONE]"),
        (ASK, lambda request, body: [{"error": {"message": "out of memory"}}], "out of memory"),
        (ASK, lambda request, body: web.Response(status=500, text="gone"), "HTTP 500: gone"),
        (ASK, lambda request, body: right(request, {**body, "stop": ["b"]}), "nothing was to stop it"),
        (ASK._replace(stop="aa"), right, "'aa' is in its text"),
        (ASK, lambda request, body: [{"choices": [{"text": "", "finish_reason": "abort"}]}], "counted as None"),
    ],
)
def test_wrong_answers_are_faults(ask: traffic.Ask, reply: Reply, words: str) -> None:
    fault = client.fault(ask, answer_to(ask, reply))
    assert fault is not None and words in fault


def test_waves_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two waves of a server, the second after a cut; a greedy output is kept for the judge."""
    monkeypatch.setattr(soak, "WAVE_S", 0.2)
    soaked = soak.Soaked({}, right=False, waves=2)
    folders, store, label = soak.Folders(tmp_path, tmp_path, tmp_path), Store(tmp_path / "soak.json", soak.KEY), {}
    folders.answers("s").write_text("")
    seen: list[str] = []

    def noting(request: web.Request, body: dict[str, Any]) -> Any:
        seen.append(body["rid"])
        return right(request, body)

    def load(deadline: float) -> None:
        async def use(http: Any, url: str) -> None:
            server = SimpleNamespace(
                name="s", url=url, model="m", complaints=list, running=lambda: True, flush=lambda: True, tail=list,
                outputs=lambda: {rid: [5] for rid in seen}, watch=SimpleNamespace(idle=lambda: POOL),
            )  # fmt: skip
            await soak.load(server, soaked, TEXT, folders, store, label, deadline)

        asyncio.run(served(noting, use))

    monkeypatch.setattr(soak, "REST_S", 0)
    monkeypatch.setattr(soak, "CLIENTS", (3, 1))
    assert soak.lacking(store, label, "s", soaked)
    load(float("-inf"))
    assert not store.rows
    load(float("inf"))
    first = len(seen)
    assert first and not soak.lacking(store, label, "s", soaked)
    load(float("inf"))
    assert len(seen) == first
    rows = list(store.rows.values())
    assert {row["wave"] for row in rows} == {0, 1} and all(row["ok"] for row in rows)
    assert rows[0]["clients"] == 3 and sum(row["counts"]["complete"] for row in rows) > 3
    kept = [json.loads(line) for line in folders.answers("s").read_text().splitlines()]
    assert kept and all(row["output"] == [5] for row in kept)
    pairs = soak_judge.answers(folders.answers("s"), TEXT, traffic.MIXED)
    assert [len(prompt) for prompt, _ in pairs] == sorted(len(prompt) for prompt, _ in pairs)


def rows(count: int, **change: Any) -> list[dict[str, Any]]:
    counts = {kind: 1 for kind in verdict.SHOWN} | {"complete": 100}
    row = {"counts": counts, "faults": [], "complaints": [], "pool": POOL, "piece": 1}
    return [{**row, "wave": i, "begin": 20 * i, "end": 20 * i + 20, **change} for i in range(count)]


def test_a_soak_that_is_whole_passes() -> None:
    assert verdict.whole(rows(60))["ok"] and not verdict.whole(rows(59))["ok"]
    assert not verdict.whole(rows(60, counts={"complete": 80}))["ok"]
    row = verdict.server("s", rows(60), True, 60)
    assert (row["ok"], row["complete"], row["retracted"]) == (True, 6000, 1)


def test_servers_side_by_side_count_once() -> None:
    assert verdict.seconds(rows(3) + rows(3) + [{"begin": 100, "end": 130}]) == 90


@pytest.mark.parametrize(
    "change",
    [
        {"faults": ["x"]}, {"complaints": ["Traceback"]}, {"pool": None}, {"pool": {**POOL, "free": 5}},
        {"pool": {**POOL, "nan_rows": 1}},
    ],
)  # fmt: skip
def test_one_wave_that_went_wrong_fails_its_server(change: dict[str, Any]) -> None:
    waves = rows(6)
    assert not verdict.server("s", [*waves[:5], {**waves[5], **change}], True, 6)["ok"]


def test_what_did_not_happen_is_missing() -> None:
    never = rows(6, counts={**rows(1)[0]["counts"], "aborted": 0})
    assert verdict.server("s", never, True, 6)["missing"] == ["aborted"]
    few = rows(6, pool={**POOL, "batch_sizes": [1, 2]})
    assert verdict.server("s", few, True, 6)["missing"] == ["batches of many sizes"]
    assert not verdict.server("s", never, True, 6)["ok"] and not verdict.server("s", few, True, 6)["ok"]
    assert verdict.server("s", few, False, 6)["ok"] and not verdict.server("s", few, False, 7)["ok"]


def test_memory_that_grows_fails() -> None:
    def grown(allocated: int, reserved: int = 0) -> Any:
        last = {**POOL, "allocated": 1000 + allocated, "reserved": 2000 + reserved}
        return verdict.memory([*rows(5), {**rows(6)[5], "pool": last}])["ok"]

    assert grown(verdict.ALLOCATED) and grown(0, verdict.RESERVED)
    assert not grown(verdict.ALLOCATED + 1) and not grown(0, verdict.RESERVED + 1)
    assert verdict.memory(rows(2))["ok"] is None
    again = rows(6, piece=2, pool={**POOL, "allocated": 1 << 40})[3:]
    assert verdict.memory([*rows(3), *again])["ok"]  # another process


def test_flags_of_a_server() -> None:
    arguments = {"port": 7, "disable_radix_cache": False, "enable_cache_report": True, "cuda_graph_bs": [1, 2]}
    assert soak_server.flags(arguments) == ["--port", "7", "--enable-cache-report", "--cuda-graph-bs", "1", "2"]


def test_a_log_that_complains_is_told_from_one_that_does_not() -> None:
    for line in ("Traceback (most recent call last):", "RuntimeError: CUDA error: an illegal", "log-probs hold NaN"):
        assert soak_server.COMPLAINTS.search(line)
    for line in ("Decode batch, #running-req: 3, nan", "Prefill batch", "POST /v1/completions HTTP/1.1 200 OK"):
        assert not soak_server.COMPLAINTS.search(line)


def test_a_server_that_ends_at_once_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import sys; print(*sys.argv[1:]); sys.exit('no GPU here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = soak_server.Server("s", tmp_path / "work", {"model_path": "m", "port": 9}, {})
    server._process.wait(30)
    with pytest.raises(RuntimeError, match="no GPU here"):
        server.ready()
    assert server.tail(2)[0] == "--host 127.0.0.1 --model-path m --port 9"
    server.stop()
