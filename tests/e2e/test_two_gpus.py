# SPDX-License-Identifier: Apache-2.0
"""What the two-GPU stage concludes, asks of SGLang, and does when it is run again. No GPU."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import half_heads
import lossless
import modes
import side_by_side
import tp_verdicts
import two_gpus
from worker import Worker

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data" / "tiny_mla"


def row(output: list[int], growth: list[int]) -> dict[str, Any]:
    return {"output": output, "growth": growth}


def test_steps_within_a_common_beginning() -> None:
    assert tp_verdicts.common([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert tp_verdicts.common([1, 2], [1, 2, 3]) == 2
    assert tp_verdicts.taken([3, 5, 9], 9) == (8, 3)
    assert tp_verdicts.taken([3, 5, 9], 8) == (4, 2)
    assert tp_verdicts.taken([3, 5, 9], 2) == (0, 0)


LONG = list(range(101))


def test_equal_acceptance() -> None:
    rows = [row(LONG, list(range(3, 102, 2)))] * 8
    found = tp_verdicts.acceptance(rows, rows)
    assert found["ok"] and found["ratio"] == found["ratio_on_common_text"] == found["common_share"] == 1
    assert found["tokens_per_step"] == 2 and found["steps_on_common_text"] == 400


@pytest.mark.parametrize(("extra", "ok"), [(1, True), (2, False)])
def test_two_percent_is_the_limit(extra: int, ok: bool) -> None:
    theirs = [row(LONG, list(range(3, 102, 2)))] * 8  # 50 steps of two tokens
    slower = sorted([*range(3, 102, 2), *range(4, 4 + 2 * extra, 2)])
    found = tp_verdicts.acceptance([row(LONG, slower)] * 8, theirs)
    assert found["ok"] is ok and found["ratio"] == pytest.approx(50 / (50 + extra))


def test_what_follows_a_difference_does_not_count() -> None:
    theirs = [row(LONG, list(range(3, 102, 2)))] * 8
    other = [*LONG[:61], *[-1] * 40]  # parts at 61; then one token a step in half of the requests
    slow = row(other, [*range(3, 62, 2), *range(62, 102)])
    fast = row(other, [*range(3, 62, 2), *range(66, 102, 5)])
    found = tp_verdicts.acceptance([slow, fast] * 4, theirs)
    assert found["ratio_on_common_text"] == 1 and found["common_share"] == pytest.approx(61 / 101)
    assert found["ratio"] != 1 and found["standard_error"] > 0
    early = [row([-1] * 101, list(range(3, 102, 2)))] * 8
    assert not tp_verdicts.acceptance(early, theirs)["ok"]


def test_nothing_accepted_shows_nothing() -> None:
    rows = [row(LONG, list(range(2, 102)))] * 8
    assert not tp_verdicts.acceptance(rows, rows)["ok"]


def test_ranks_that_end_requests_differently_are_counted() -> None:
    one = [{"rid": f"{i}", **row([i, i], [1, 2])} for i in range(3)]
    assert tp_verdicts.differing([one, list(reversed(one))]) == 0
    assert tp_verdicts.differing([one, one[:2]]) == 1
    assert tp_verdicts.differing([one, [{**one[0], "growth": [2]}, {**one[1], "output": [7, 7]}, one[2]]]) == 2


TREES = (
    "[TP1] Scheduler hit an exception: RuntimeError: treeverify: the draft trees of step 5 differ between ranks: "
    "rank 0: 0123456789abcdef; rank 1: fedcba9876543210. Please report this, with the log of every rank."
)
PATCHES = (
    "treeverify: patches and kernels differ between ranks: rank 0: v0.5.12.post1 patches aaaaaaaaaaaa kernels bbbb; "
    "rank 1: v0.5.12.post1 patches cccccccccccc kernels none. Apply the same checkout of treeverify on every machine."
)


def test_a_server_that_stopped_says_why() -> None:
    killed = {"returncode": -9, "seconds": 70.0}
    found = tp_verdicts.stop("trees", killed, f"x\n{TREES}\ny")
    assert found["ok"] and (found["step"], found["second"]) == ("5", "fedcba9876543210")
    found = tp_verdicts.stop("installation", killed, PATCHES)
    assert found["ok"] and found["first"] == "v0.5.12.post1 patches aaaaaaaaaaaa kernels bbbb"
    for kind, run, log in (
        ("trees", {**killed, "returncode": 0}, TREES),  # served on
        ("trees", {**killed, "returncode": None}, TREES),  # hung
        ("trees", killed, "out of memory"),
        ("installation", killed, TREES),
        ("trees", killed, TREES.replace("fedcba9876543210", "0123456789abcdef")),
    ):
        assert not tp_verdicts.stop(kind, run, log)["ok"]


def test_what_a_log_tells() -> None:
    log = (
        "treeverify: TARGET_VERIFY of flashinfer (MLA) runs on treeverify's hopper kernels.\n"
        "Custom allreduce v2 initialized successfully\nPrefill batch, #new-seq: 2, cuda graph: False, x\n"
        "Decode batch, #running-req: 2, cuda graph: True, y\nDecode batch, #running-req: 2, cuda graph: False, z\n"
    )
    assert tp_verdicts.about(log) == {
        "kernels": "hopper kernels", "all_reduce": "custom v2", "graph_replays": 1, "without_graph": 1,
    }  # fmt: skip
    failed = tp_verdicts.about("Setup Custom allreduce failed with no nvcc. To silence\n")
    assert failed["all_reduce"].startswith("Setup Custom allreduce failed with no nvcc") and failed["kernels"] is None


def timed(**us: float) -> list[dict[str, Any]]:
    return [{"gpu": 0, "bs": 1, "heads": int(name[1:]), "impl": "hopper", "us": value} for name, value in us.items()]


def test_attention_of_half_the_heads() -> None:
    def oks(rows: list[dict[str, Any]]) -> list[bool]:
        return [found["ok"] for found in tp_verdicts.attention(rows, 64, 32, 0.65)]

    assert oks(timed(h64=100.0, h32=65.0)) == [True]
    assert oks(timed(h64=100.0, h32=66.0)) == oks(timed(h64=100.0)) == [False]
    assert oks([{**one, "wrong": True} for one in timed(h64=100.0, h32=50.0)]) == [False]
    both = [{**one, "gpu": gpu} for gpu in (0, 1) for one in timed(h64=100.0, h32=50.0)]
    assert oks(both) == [True, True]


def test_half_heads_runs_dry() -> None:
    rows = half_heads.measure(1, context=20, batches=(1, 2), device="cpu")
    assert [(r["gpu"], r["bs"], r["heads"], r["n"]) for r in rows] == [
        (1, 1, 64, 9), (1, 1, 32, 9), (1, 2, 64, 9), (1, 2, 32, 9)]  # fmt: skip
    assert all(r["us"] > 0 and r["error"] < 1e-2 for r in rows)
    assert len(tp_verdicts.attention(rows, half_heads.WHOLE, half_heads.SHARE, half_heads.AT_MOST)) == 2


def saved(work: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    data = {"rows": rows, "ranks": 2, "differing": 0, "unlike_answers": 0, "seconds": {}, **more}
    side_by_side.save(work, name, data)
    (work / f"{name}.log").write_text("Decode batch, cuda graph: True\n")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What a run leaves in which all went well."""
    greedy = [{"rid": f"0-{i}", **row(LONG[:96], list(range(2, 97, 2)))} for i in range(8)]
    for name in [*two_gpus.FORCED, *two_gpus.LIKE.values()]:
        saved(tmp_path, name, greedy)
    draws = [{"rid": f"{i}", **row([i] * two_gpus.SAMPLED_TOKENS, [9, 32])} for i in range(two_gpus.SAMPLED)]
    saved(tmp_path, two_gpus.CHECKED, draws)
    for name, log in (("differing_tp2", TREES), ("foreign_tp2", PATCHES)):
        side_by_side.save(tmp_path, name, {"returncode": -9, "seconds": 60.0})
        (tmp_path / f"{name}.log").write_text(log)
    score = {"tokens": 768, "worst_deficit": 0.125, "mean_deficit": 0.0, "outputs": 8, "equal_to_tp1_alone": 8}
    scores = {name: {**score, "deficits": [0.125]} for name in two_gpus.FORCED}
    scores[two_gpus.WRONG]["deficits"] = [9.0]
    side_by_side.save(tmp_path, two_gpus.JUDGE, {"gap": {}, "margin": 0.25, "scores": scores, "seconds": {}})
    for gpu, name in enumerate(two_gpus.GPUS):
        rows = [{**one, "gpu": gpu} for one in timed(h64=100.0, h32=50.0)]
        side_by_side.save(tmp_path, name, {"rows": rows})
    return tmp_path


def failures(work: Path) -> list[str]:
    rows = two_gpus.rows_of_report(work)
    names = ("server", "acceptance", "must_stop", "attention")
    return [next(str(r[name]) for name in names if name in r) for r in rows if not r["ok"]]


def test_all_is_well(work: Path) -> None:
    assert failures(work) == []


def edit(work: Path, name: str, **change: Any) -> None:
    side_by_side.save(work, name, {**(side_by_side.load(work, name) or {}), **change})


def test_each_fault_is_found(work: Path) -> None:
    edit(work, "alone_tp2", differing=1)
    edit(work, "dflash_tp2", ranks=1)
    edit(work, two_gpus.CHECKED, unlike_answers=1)
    edit(work, "foreign_tp2", returncode=0)
    (work / "ngram_tp2.log").write_text("Decode batch, cuda graph: True\nDecode batch, cuda graph: False\n")
    scored = side_by_side.load(work, two_gpus.JUDGE) or {}
    scored["scores"]["ddtree_tp2"]["deficits"] = [0.3]
    scored["scores"][two_gpus.WRONG]["deficits"] = [0.2]
    edit(work, two_gpus.JUDGE, scores=scored["scores"])
    assert failures(work) == [*two_gpus.FORCED, two_gpus.CHECKED, "foreign_tp2"]


def test_what_is_missing_is_not_well(work: Path) -> None:
    for path in work.glob("*.json"):
        path.unlink()
    found = two_gpus.rows_of_report(work)
    assert len(found) == 5 + 3 + 1 + 2 + 2 and not any(r["ok"] for r in found) and all(r["missing"] for r in found)


def test_scores_that_lack_a_server_are_made_again(work: Path) -> None:
    judgement = work / f"{two_gpus.JUDGE}.json"
    two_gpus.forget_old_judgement(work)
    assert judgement.exists()
    (work / "ngram_tp2.json").rename(work / "kept")
    two_gpus.forget_old_judgement(work)
    assert not judgement.exists()
    two_gpus.forget_old_judgement(work)  # and where there is none


@pytest.mark.parametrize(
    ("name", "log"), [("foreign_tp2", "out of memory"), ("differing_tp2", TREES.replace("step 5", "step 6"))]
)
def test_a_stop_for_another_reason_is_tried_again(work: Path, name: str, log: str) -> None:
    two_gpus.forget_wrong_stops(work)
    assert all((work / f"{name}.json").exists() for name in two_gpus.STOPPING)
    (work / f"{name}.log").write_text(log)
    assert failures(work) == [name]
    two_gpus.forget_wrong_stops(work)
    assert [one for one in two_gpus.STOPPING if not (work / f"{one}.json").exists()] == [name]


def test_records_wait_for_the_slower_rank(tmp_path: Path) -> None:
    line = json.dumps({"rid": "0", **row([1], [1])}) + "\n"
    (tmp_path / "x.rank0.jsonl").write_text(line * 2)
    (tmp_path / "x.rank1.jsonl").write_text(line + line[:5])
    found = two_gpus.records(tmp_path / "x", 2, 2, patience_s=0.3)
    assert [len(rows) for rows in found] == [2, 1]
    assert two_gpus.records(tmp_path / "y", 2, 1, patience_s=0) == [[], []]


def test_requests_have_names_of_their_own() -> None:
    inputs = [[i] for i in range(7)]
    for name, count in (("ddtree_tp2", 7), ("alone_tp2", 4), ("ngram_tp2", 14), (two_gpus.CHECKED, two_gpus.SAMPLED)):
        sent = [rid for batch in two_gpus.requests(name, inputs) for rid, _ in batch]
        assert len(sent) == len(set(sent)) == count
    assert [len(batch) for batch in two_gpus.requests("ngram_tp1", inputs)] == [6, 1, 6, 1]


def test_fewer_gpus_than_two_run_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "two_gpus.py"), "--target", "t", "--draft", "d"]
    paths = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        command + paths, capture_output=True, text=True, check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == two_gpus.TOO_FEW_GPUS, done.stderr
    assert "needs two GPUs, there are 0" in done.stdout and not list(tmp_path.iterdir())


ENDS = [("import os; os.kill(os.getpid(), 9)", -9), ("", 0), ("time.sleep(60)", None)]


@pytest.mark.parametrize(("body", "code"), ENDS)
def test_a_watched_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int | None) -> None:
    script = tmp_path / "server.py"
    script.write_text(f"import sys, time\nassert '--unwatched' in sys.argv\n{body}\n")
    monkeypatch.setattr(two_gpus, "__file__", str(script))
    two_gpus.watch_it_stop("foreign_tp2", [], tmp_path, 1, limit_s=3)
    assert (side_by_side.load(tmp_path, "foreign_tp2") or {})["returncode"] == code


def test_both_sizes_differ_in_nothing_else() -> None:
    only = {"tp_size", "base_gpu_id", "enforce_disable_flashinfer_allreduce_fusion"}
    for ours, theirs in two_gpus.LIKE.items():
        a, b = two_gpus.SERVERS[ours], two_gpus.SERVERS[theirs]
        assert {key for key in {*a.arguments, *b.arguments} if a.arguments.get(key) != b.arguments.get(key)} <= only
        assert (a.hooks, a.environment) == (b.hooks, b.environment)
    assert two_gpus.SERVERS[two_gpus.WRONG].environment["TREEVERIFY_DROP_MASK_FOR_TEST"] == "1"
    for server in two_gpus.SERVERS.values():
        assert two_gpus.NO_MULTICAST.items() <= server.environment.items()


@pytest.fixture(scope="module")
def patched(patched_tree: Path) -> Iterator[Worker]:
    worker = Worker(patched_tree)
    yield worker
    worker.close()


def completed(arguments: dict[str, Any]) -> list[Any]:
    import dataclasses

    from mla_rig import server_args
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.treeverify.ddtree import algorithm

    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    args = server_args(**arguments, device="cpu")
    if args.speculative_algorithm == "DDTREE":
        algorithm.complete(args)
    return [sorted(set(arguments) - fields), args.speculative_num_draft_tokens]


def test_rank_is_where_sglang_passes_it(patched_tree: Path) -> None:
    import scheduler_hooks

    tree = ast.parse((patched_tree / "sglang/srt/managers/scheduler.py").read_text())
    (function,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "run_scheduler_process"]
    assert [argument.arg for argument in function.args.args].index("tp_rank") == scheduler_hooks.TP_RANK


def test_arguments_that_sglang_takes(patched: Worker) -> None:
    alone = lossless.Server("mla", two_gpus.JUDGE_ARGUMENTS)
    for name, server in {**two_gpus.SERVERS, "judge": alone}.items():
        arguments = modes.engine_arguments(DATA / "target", DATA / "draft", **server.arguments)
        unknown, width = patched(completed, arguments=arguments)
        assert unknown == [], name
        if server.arguments.get("speculative_algorithm") == "DDTREE":
            assert width == modes.WIDTH, name


def records_of_steps(prefix: str) -> list[dict[str, Any]]:
    """A request of three steps that is met once more after its end, and one that goes on."""
    import os
    from types import SimpleNamespace

    import scheduler_hooks
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin as Results

    os.environ[scheduler_hooks.STEPS] = prefix
    own = Results.process_batch_result_decode

    def grow(self: Any, batch: Any, result: Any) -> None:
        for req in list(batch.reqs):
            if not req.finished():
                req.output_ids_through_stop += result
        batch.reqs = []

    try:
        Results.process_batch_result_decode = grow
        scheduler_hooks.steps(1)
        reqs = []
        for rid, most in (("a", 6), ("b", 99)):
            req = SimpleNamespace(rid=rid, output_ids_through_stop=[7])
            req.finished = lambda req=req, most=most: len(req.output_ids_through_stop) >= most
            reqs.append(req)
        for tokens in ([1, 2], [3], [4, 5], [6]):
            Results.process_batch_result_decode(None, SimpleNamespace(reqs=reqs), tokens)
    finally:
        Results.process_batch_result_decode = own
    return [json.loads(line) for line in Path(f"{prefix}.rank1.jsonl").read_text().splitlines()]


def test_steps_are_written_down(patched: Worker, tmp_path: Path) -> None:
    found = patched(records_of_steps, prefix=str(tmp_path / "x"))
    assert found == [{"rid": "a", "growth": [3, 4, 6], "output": [7, 1, 2, 3, 4, 5]}]


def trees_built(rank: int) -> list[list[int]]:
    """Tokens of a tree of three nodes in each of the steps 4, 5 and 6, with the hook on this rank."""
    import scheduler_hooks
    import torch
    from sglang.srt.treeverify.ddtree.tree import Candidates, DraftTree

    own, tokens = DraftTree.__dict__["build"], []
    try:
        scheduler_hooks.other_candidates(rank)
        root, prefix = torch.tensor([9]), torch.tensor([3], dtype=torch.int32)
        for _ in range(scheduler_hooks.DIFFERING_STEP + 1):
            drawn = Candidates(torch.tensor([[[4, 7]]]), torch.tensor([[[-0.1, -2.0]]]))
            tokens += DraftTree.build(drawn, root, prefix, 3).tokens.tolist()
    finally:
        DraftTree.build = own
    return tokens[scheduler_hooks.DIFFERING_STEP - 2 :]


def test_one_rank_drafts_other_tokens_in_one_step(patched: Worker) -> None:
    assert patched(trees_built, rank=0) == [[9, 4, 7]] * 3
    assert patched(trees_built, rank=1) == [[9, 4, 7], [9, 5, 6], [9, 4, 7]]


def installed(rank: int) -> list[str]:
    import scheduler_hooks
    from sglang.srt.treeverify import ranks

    own = ranks.__file__
    try:
        before = ranks._installed()
        scheduler_hooks.other_manifest(rank)
        return [before, ranks._installed()]
    finally:
        ranks.__file__ = own


def test_one_rank_has_another_manifest(patched: Worker) -> None:
    import scheduler_hooks

    before, after = patched(installed, rank=0)
    assert before == after != "no manifest"
    before, after = patched(installed, rank=1)
    assert before != after and after.split()[2] == scheduler_hooks.OTHER_PATCH_SET[:12]
    said = f"treeverify: patches and kernels differ between ranks: rank 0: {before}; rank 1: {after}. Apply"
    assert tp_verdicts.stop("installation", {"returncode": -9, "seconds": 1.0}, said)["ok"]
