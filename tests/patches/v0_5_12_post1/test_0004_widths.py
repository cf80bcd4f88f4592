# SPDX-License-Identifier: Apache-2.0
"""0004: trees of changing width (TREEVERIFY_DDTREE_ADAPT): one target, one pool, graphs and costs of each width."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from worker import Worker

BF16 = 5e-3


def decode(widths: list[int], seed: int) -> dict[str, Any]:
    """Greedy requests to their ends through the worker's own hook, whose Budget is made to change width every step."""
    import torch
    from absent_kernels import absent

    absent()
    from types import SimpleNamespace

    from sglang.srt.treeverify.ddtree.budget.controller import Budget
    from sglang.srt.treeverify.ddtree.budget.curve import Costs, Curve
    from sglang.srt.treeverify.ddtree.budget.graphs import Graphs
    from sglang.srt.treeverify.ddtree.budget.start import Adaptive
    from sglang.srt.treeverify.ddtree.masks import MaskForm
    from sglang.srt.treeverify.ddtree.stats import Stats
    from sglang.srt.treeverify.ddtree.worker import DDTreeWorker
    from tree_batch import TreeBatch, sampling

    class Alternating(Budget):
        def choose(self, *args: Any) -> int:
            super().choose(*args)
            return sum(self._steps.values()) % len(widths)

    seen: list[Any] = []

    class Watched(Alternating):
        def observe(self, paths: Any, promise: Any) -> None:
            seen.append((self.width, self.listens, len(promise), max(path.nodes[-1] for path in paths)))
            super().observe(paths, promise)

    trees = TreeBatch(
        [[1, 2, 3, 4], [7, 7], [9, 10, 11, 1, 2, 3]],
        [sampling(max_new_tokens=30 + 9 * i, stop_token_ids=[3] if i == 1 else None) for i in range(3)], seed=seed,
    )  # fmt: skip
    costs = Costs((64,), tuple((1.0 + i,) for i in range(len(widths))))
    budget = Watched(Curve(tuple(widths), (4,), {4: costs}))
    runner = SimpleNamespace(sampler=trees.sampler, graph_runner=f"graphs of {widths[-1]}")
    graphs = object.__new__(Graphs)
    graphs.__dict__.update(
        _model_runner=runner, _current=runner.graph_runner, runners={n: f"graphs of {n}" for n in widths}
    )
    worker = object.__new__(DDTreeWorker)
    worker.__dict__.update(
        _adaptive=Adaptive(budget, graphs), _width=widths[-1], _mask_form=MaskForm.FULL, tree_stats=Stats("cpu"),
        model_runner=runner, _checks_ranks=False, _steps=0,
    )  # fmt: skip
    everyone, wrong, count = list(trees.batch.reqs), [], 0
    while trees.batch.reqs:
        worker._adaptive.begin(trees.batch)
        free = len(trees.allocator.free_pages) + len(trees.allocator.release_pages)
        step = trees.step(4, 0, 12, 0.7, worker)
        n, bs = budget.width, len(trees.batch.reqs)
        wrong += [] if n == widths[count % len(widths)] else [f"width {n} at step {count}"]
        wrong += [] if len(step["slots"]) == bs * n == step["tree"].tokens.numel() else ["slots of another width"]
        kept = len(trees.allocator.free_pages) + len(trees.allocator.release_pages)
        wrong += [] if free - kept == int(step["lengths"].sum()) else ["slots kept"]
        wrong += [] if runner.graph_runner == f"graphs of {n}" else ["graphs of another width"]
        wrong += [f"{trees.unaccounted()} slots lost"] if trees.unaccounted() else []
        lengths = torch.tensor([req.kv_committed_len for req in trees.batch.reqs])
        wrong += [] if torch.equal(trees.batch.seq_lens, lengths) else ["lengths"]
        trees.finish([req for req in trees.batch.reqs if req.finished()])
        count += 1
    for req in everyone:
        text = list(req.origin_input_ids)
        while len(text) < len(req.origin_input_ids) + len(req.output_ids):
            text.append(int(trees.table[text[-2], text[-1]].argmax()))
        wrong += [] if text == req.origin_input_ids + req.output_ids else [f"{req.rid} differs from the target alone"]
    for width, listens, promised, last in seen:
        wrong += [] if listens and promised == widths[-1] else ["promise of another width"]
        wrong += [] if last < width else ["a path past its tree"]
    return {"wrong": wrong, "seen": len(seen), "steps": count,
            "tokens": budget._acceptance.tokens()}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("widths", [[5, 12, 33], [5, 6], [5, 40]])
def test_output_and_pool_are_the_same_while_widths_alternate(patched: Worker, widths: list[int], seed: int) -> None:
    found = patched(decode, widths=widths, seed=seed)
    assert found["wrong"] == []
    assert found["seen"] == found["steps"] // 8 > 0
    assert found["tokens"] == sorted(found["tokens"]) and found["tokens"][0] > 1.2


def chosen(rank: int, folder: str) -> list[Any]:
    """Widths of one of two ranks, whose clocks and measurements differ, and its curve."""
    import random

    from absent_kernels import absent

    absent()
    from mla_rig import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.treeverify.ddtree.budget.controller import Budget
    from sglang.srt.treeverify.ddtree.budget.curve import Costs, Curve
    from sglang.srt.treeverify.ddtree.budget.start import of_rank_0
    from sglang.srt.treeverify.ddtree.tree import Path as TreePath

    server_args()
    parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", rank, "gloo")
    parallel_state.initialize_model_parallel(2, backend="gloo")
    measured = of_rank_0([[1.0 + rank], [2.0 + 3 * rank]])
    curve, now = Curve((8, 16), (4,), {4: Costs.of((1024,), measured)}), [0.0]
    budget, widths = Budget(curve, of_rank_0, clock=lambda: now[0]), []
    ours, both = random.Random(rank), random.Random(9)
    for _ in range(300):
        bs, taken = both.randint(1, 4), both.randint(0, 7)
        widths.append(budget.begin(bs, 1024 * bs))
        path = TreePath(16, list(range(taken + 1)), [0] * (taken + 1))
        budget.observe([path] * bs, [1.0] + [0.5] * 7 + [0.1] * 8)
        now[0] += ours.uniform(1, 4) + 9 * rank
    return [widths, measured]


def test_ranks_choose_the_same_widths(patched_package: Path, tmp_path: Path) -> None:
    ranks = [Worker(patched_package) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(ranks[i], chosen, rank=i, folder=str(tmp_path)) for i in range(2)]
            (widths, measured), others = (one.result(timeout=300) for one in both)
    finally:
        for rank in ranks:
            rank.close()
    assert others == [widths, measured] and measured == [[1.0], [2.0]]
    assert set(widths) == {8, 16}


def captured_runners(rig: Any, backend: Any, sizes: list[int], widths: list[int]) -> dict[int, Any]:
    """The real graph runners of several widths on one backend, captured but for the graphs themselves."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runners = {}
    for n in sorted(widths, reverse=True):
        backend.init_cuda_graph_state(sizes[-1], sizes[-1] * n)
        runner = runners[n] = rig.graph_runner(backend, sizes[-1], n)
        runner.capture_bs, rows, lens = sizes, runner.buffers.req_pool_indices, runner.buffers.seq_lens
        runner.metadata = {}
        for bs in reversed(sizes):
            backend.init_forward_metadata_capture_cuda_graph(
                bs, bs * n, rows[:bs], lens[:bs], None, ForwardMode.TARGET_VERIFY, runner.get_spec_info(bs * n)
            )
            runner.metadata[bs] = backend.forward_metadata
    return runners


def alternate(order: list[int]) -> list[float]:
    """Padded replays of several widths in turn, each attending as its graph would."""
    from mla_rig import Rig, worst_row

    rig = Rig(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32)
    backend = rig.backend()
    runners = captured_runners(rig, backend, [2, 4], sorted(set(order)))
    errors = []
    for i, n in enumerate(order):
        prefixes = [[9, 44, 17], [3], [60, 5]][i % 3]
        step, runner = rig.step(prefixes, n), runners[n]
        batch = step.forward_batch("eagle")
        runner.replay_prepare(batch)
        real = len(prefixes) * n
        batch.out_cache_loc, backend.forward_metadata = runner.buffers.out_cache_loc, runner.metadata[runner.bs]
        out = step.padded(runner.bs * n - real).attend(backend, batch)
        errors.append(worst_row(out[:real], step.expected()))
        errors.append(float(out[real:].abs().max()) if real < len(out) else 0.0)
    return errors


def test_graphs_of_several_widths_replay_in_turn(patched: Worker) -> None:
    errors = patched(alternate, order=[32, 8, 16, 8, 32, 16, 16, 8, 32])
    assert len(errors) == 18 and all(error <= BF16 for error in errors), errors


def measured() -> dict[str, Any]:
    """The start-up measurement on real runners and pools, with a clock that reads what a graph would read."""
    from types import SimpleNamespace

    import torch
    from mla_rig import Rig
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.treeverify.ddtree.budget import measure

    rig = Rig(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32, context=220)
    backend, table = rig.backend(), rig.requests.req_to_token
    table.random_(0, 100)
    before, replayed, wrong = table.clone(), [], []
    runners = captured_runners(rig, backend, [1, 2, 8], [8, 16, 32])
    rig.runner.device_timer = None

    class Graph:
        """What a replay reads of the prepared buffers, and where it would write."""

        def __init__(self, runner: Any, bs: int) -> None:
            self.runner, self.bs = runner, bs

        def replay(self) -> None:
            n, buffers, metadata = self.runner.num_tokens_per_bs, self.runner.buffers, self.runner.metadata[self.bs]
            ends = metadata.kv_indptr[: self.bs + 1]
            slots = metadata.kv_indices[: int(ends[-1])]
            if len(slots.unique()) < len(slots) or int(slots.min()) < 1 or int(slots.max()) > rig.pool.size:
                wrong.append("slots are read twice, or are not the pool's")
            if buffers.out_cache_loc[: self.bs * n].any():
                wrong.append("writes past the dummy slot")
            if len(buffers.input_ids[: self.bs * n].unique()) < min(self.bs * n, 32) / 2:
                wrong.append("tokens are alike")
            replayed.append((n, self.bs, int(ends[-1])))

    for runner in runners.values():
        runner.is_dllm, runner.deepep_adapter = False, SimpleNamespace(replay=lambda: None)
        runner.graphs = {bs: Graph(runner, bs) for bs in (1, 2, 8)}
        runner.output_buffers = dict.fromkeys((1, 2, 8), LogitsProcessorOutput(next_token_logits=torch.empty(256, 1)))

    def timer(launch: Any, repeats: int) -> float:
        launch()
        n, bs, kv = replayed[-1]
        return 1e-3 * (1 + bs * n / 64) + 1e-6 * kv

    told: list[Any] = []
    first, measure.FIRST_CONTEXT = measure.FIRST_CONTEXT, 16
    try:
        curve = measure.measure(runners, rig.runner, lambda value: told.append(value) or value, timer)
    finally:
        measure.FIRST_CONTEXT = first
    exact = []
    for bs in (1, 2, 8):
        for context in curve.costs[bs].contexts:
            expected = [1e-3 * (1 + bs * n / 64) + 1e-6 * bs * (context + n) for n in (8, 16, 32)]
            exact.append(max(abs(a - b) for a, b in zip(curve.seconds(bs, bs * context), expected, strict=True)))
    contexts = {bs: list(costs.contexts) for bs, costs in curve.costs.items()}
    return {"wrong": wrong, "error": max(exact), "restored": torch.equal(table, before), "told": len(told),
            "contexts": contexts, "line": curve.line()}  # fmt: skip


def test_costs_are_measured_on_requests_of_their_own_slots(patched: Worker) -> None:
    found = patched(measured)
    assert found["wrong"] == [] and found["restored"]
    assert found["error"] < 1e-9
    assert found["contexts"] == {"1": [16, 64, 224], "2": [16, 64, 224], "8": [16, 64, 224]}, found["contexts"]
    assert found["told"] == 4, "rank 0's longest pass, and its times of three batch sizes"
    assert "8/16/32 nodes" in found["line"]


def recaptured() -> dict[str, Any]:
    """Which runners are captured, for which width, at first and after SGLang replaced its own."""
    from types import SimpleNamespace

    from absent_kernels import absent

    absent()
    from sglang.srt.model_executor import cuda_graph_runner as module
    from sglang.srt.treeverify.ddtree.budget.graphs import Graphs

    made: list[Any] = []

    def record(model_runner: Any, **arguments: Any) -> str:
        made.append([arguments["attn_backend"], arguments["speculative_num_draft_tokens"]])
        return f"runner {len(made)}"

    real, module.CudaGraphRunner = module.CudaGraphRunner, record
    try:
        target = SimpleNamespace(graph_runner="own", attn_backend="backend")
        graphs = Graphs(target, (8, 16, 64))
        first = dict(graphs.runners)
        graphs.switch(16)
        graphs.recapture_if_replaced()
        switched, unchanged = target.graph_runner, graphs.runners == first
        target.graph_runner = "own again"
        graphs.recapture_if_replaced()
    finally:
        module.CudaGraphRunner = real
    return {"made": made, "first": first, "switched": switched, "unchanged": unchanged, "again": graphs.runners}


def test_every_width_is_captured_on_the_targets_backend_and_again_where_sglang_does(patched: Worker) -> None:
    found = patched(recaptured)
    assert found["made"] == [["backend", 16], ["backend", 8]] * 2
    assert found["first"] == {"64": "own", "16": "runner 1", "8": "runner 2"}
    assert found["switched"] == "runner 1" and found["unchanged"]
    assert found["again"] == {"64": "own again", "16": "runner 3", "8": "runner 4"}


def started(form: str, adapt: str = "1", tokens: str = "", **runner: Any) -> str:
    """What start() says about a server."""
    import os
    from types import SimpleNamespace

    from absent_kernels import absent

    absent()
    from sglang.srt.treeverify.ddtree.budget.start import start
    from sglang.srt.treeverify.ddtree.budget.widths import ADAPT, BELIEVE
    from sglang.srt.treeverify.ddtree.masks import MaskForm

    given = {"graph_runner": "graphs", "width": 64, "enable_lora": False, **runner}
    args = SimpleNamespace(speculative_num_draft_tokens=given.pop("width"), enable_lora=given.pop("enable_lora"))
    os.environ.update({ADAPT: adapt, BELIEVE: tokens})
    try:
        return str(start(SimpleNamespace(server_args=args, **given), MaskForm[form], 8, 0))
    except ValueError as e:
        return str(e)
    finally:
        del os.environ[ADAPT], os.environ[BELIEVE]


@pytest.mark.parametrize(
    ("given", "told"),
    [({"form": "FULL"}, "kernels"), ({"form": "PACKED", "graph_runner": None}, "--disable-cuda-graph"),
     ({"form": "PACKED", "enable_lora": True}, "--enable-lora"), ({"form": "PACKED", "tokens": "8:2"}, "FOR_TEST"),
     ({"form": "PACKED", "tokens": "fast"}, "FOR_TEST")],
)  # fmt: skip
def test_what_cannot_adapt_is_refused(patched: Worker, given: dict[str, Any], told: str) -> None:
    found = patched(started, **given)
    assert found.startswith("treeverify: TREEVERIFY_DDTREE_ADAPT") and told in found


def test_it_is_off_by_default_and_with_one_width(patched: Worker) -> None:
    assert patched(started, form="FULL", adapt="") == "None"
    assert patched(started, form="PACKED", width=8) == "None"
