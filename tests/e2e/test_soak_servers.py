# SPDX-License-Identifier: Apache-2.0
"""A soak from its command line to its report, around servers that answer by rote: start, waves, cut, resumption."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("aiohttp")  # it comes with SGLang

import soak  # noqa: E402
import soak_traffic as traffic  # noqa: E402

DATA = Path(__file__).resolve().parents[1] / "data" / "tiny_mla"

SERVER = '''
"""Says of every request what sglang.launch_server would, and writes what the hooks write."""
import contextlib, json, os, sys
from importlib.metadata import entry_points
from aiohttp import web

(plugin,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "treeverify-hooks"]
assert plugin.load().__name__ == "as_plugin" and os.environ["TV_E2E_HOOKS"] == "watch finite steps"
words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
dropped = "TREEVERIFY_DROP_MASK_FOR_TEST" in os.environ
pool = {"total": 10, "free": 6, "cached": 4, "each_once": True, "rows": 8, "rows_free": 8, "nan_rows": 0,
        "retracted": 0, "batch_sizes": list(range(1, 33)), "allocated": 1000, "reserved": 2000}


def noted(body, tokens):
    with open(os.environ["TV_E2E_STEPS"] + ".rank0.jsonl", "a") as file:
        file.write(json.dumps({"rid": body["rid"], "growth": [tokens], "output": [int(dropped)] * tokens}) + "\\n")
    with open(os.environ["TV_E2E_WATCH"], "a") as file:
        file.write(json.dumps(pool) + "\\n")


async def completions(request):
    body = await request.json()
    tokens = body["max_tokens"]
    end = "stop" if body.get("stop") else "length"
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens,
             "prompt_tokens_details": {"cached_tokens": 1}}
    noted(body, tokens)
    if not body["stream"]:
        return web.json_response({"choices": [{"text": "z", "finish_reason": end}], "usage": usage})
    response = web.StreamResponse()
    await response.prepare(request)
    events = []
    for event in [{"choices": [{"text": "z"}]}] * 9 + [{"choices": [{"text": "", "finish_reason": end}]},
                                                       {"choices": [], "usage": usage}]:
        events.append(f"data: {json.dumps(event)}\\n\\n".encode())
    with contextlib.suppress(ConnectionError):  # a client that went away
        for event in [*events, b"data: [DONE]\\n\\n"]:
            await response.write(event)
    return response


async def fine(request):
    return web.Response()


app = web.Application(client_max_size=1 << 26)
app.add_routes([web.post("/v1/completions", completions), web.post("/abort_request", fine),
                web.get("/health", fine), web.post("/flush_cache", fine)])
print("ready", flush=True)
web.run_app(app, host="127.0.0.1", port=port, print=None)
'''

BENCH = """
import json, sys
from urllib.request import Request, urlopen

words = sys.argv[1:]
body = {"rid": "bench", "prompt": [1], "max_tokens": 1, "stream": False}
url = words[words.index("--base-url") + 1] + "/v1/completions"
urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})).read()
done = int(words[words.index("--num-prompts") + 1])
with open(words[words.index("--output-file") + 1], "a") as file:
    file.write(json.dumps({"completed": done, "total_output_tokens": 7}) + "\\n")
"""


def free_port() -> int:
    """One of several in a row."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(int(probe.getsockname()[1]), 60_000)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a soak of two servers and four waves, with the module above as sglang.launch_server."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    (package / "bench_serving.py").write_text(BENCH)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(soak, "WAVE_S", 0.3)
    monkeypatch.setattr(soak, "CLIENTS", (4, 1))
    monkeypatch.setattr(soak, "BENCH_EVERY", 3)
    servers = {name: soak.Soaked({}, waves=4, **more) for name, more in
               (("good", {}), ("long", {"trained": False, "lengths": traffic.LONG}))}  # fmt: skip
    monkeypatch.setattr(soak, "SERVERS", servers)
    monkeypatch.setattr(soak, "label_here", lambda: {"card": "a card", "build": "a build"})
    monkeypatch.setattr(traffic.Text, "held_out", lambda model: traffic.Text(range(2 * traffic.LONGEST), 0))
    monkeypatch.setattr(soak, "judge_all", judged)
    return ["--target", str(DATA / "target"), "--draft", str(DATA / "draft"), "--work", str(tmp_path / "work"), "--out",
            str(tmp_path / "soak.json"), "--port", str(free_port())]  # fmt: skip


def judged(chosen: dict[str, soak.Soaked], folders: soak.Folders, port: int) -> None:
    """In place of the targets: nothing beyond the margin."""
    for name in chosen:
        assert folders.answers(name).read_text().count("output") > 3
        scores = {"judged_outputs": 1, "judged_tokens": 5, "beyond_margin": 0, "margin": 0.25}
        folders.scores(name).write_text(json.dumps(scores))


def test_a_soak_goes_on_where_it_was_and_ends_with_a_report(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[dict[str, Any]] = []

    def write(path: Path, rows: list[dict[str, Any]], **more: Any) -> None:
        written[:] = rows
        path.write_text(json.dumps({"ok": all(row["ok"] for row in rows), "rows": rows, **more}))

    monkeypatch.setattr(soak.report, "write", write)
    budget = ["--budget-s", str(15 + soak.REST_S + soak.WAVE_S + 4)]  # room for the start and for a wave or two
    assert soak.main([*words, *budget]) == soak.OUT_OF_TIME, capsys.readouterr().out
    some = [row["wave"] for row in written if "wave" in row]
    code = soak.main([*words, "--budget-s", "500"])
    said = capsys.readouterr().out
    waves = [row for row in written if "wave" in row]
    assert {(row["server"], row["wave"]) for row in waves} == {(name, i) for name in ("good", "long") for i in range(4)}
    assert len(some) < len(waves)
    assert [row for row in waves if not row["ok"]] == [], said
    bench = [row for row in waves if row.get("bench_serving")]
    assert {row["wave"] for row in bench} == {2} and all(row["counts"]["complete"] == 60 for row in bench)
    assert {row["server"] for row in written if row.get("judged_tokens") == 5 and row["ok"]} == {"good", "long"}
    whole = written[-1]
    assert whole["requests"] == sum(row["counts"]["complete"] for row in waves) and not whole["ok"]
    assert code == 1, "it was neither 20 minutes nor 5000 requests"
    assert "--load-format dummy" not in (tmp_path / "work" / "good.log").read_text()
