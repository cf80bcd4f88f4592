# SPDX-License-Identifier: Apache-2.0
"""sglang.Engine whose scheduler process is prepared before it starts: HOOKS names how, and "watch" where to write.

* `native`: float32. SGLang's fused norm, rotary and activation kernels take half precision; their own plain PyTorch
  forms stand in.
* `causal`: a negative control. DDTREE's mask for SGLang's own backends shows every node all nodes before it.
* `unmoved`: a negative control. DDTREE's accepted KV stays where the tree had it, and its slots are a chain's.
* `compact`: a request's slots are moved together every few steps, however few they are (TREEVERIFY_DEFRAG=1).
* `alternate`: DDTREE's trees take another width every step, where they may (TREEVERIFY_DDTREE_ADAPT=1).
* `watch`: whenever the scheduler is idle after it has done something, one JSON line about its pools is appended to the
  file named by $TV_E2E_WATCH.
* `steps`: each rank writes one JSON line for every request that ends, to $TV_E2E_STEPS.rankN.jsonl: its output, and how
  long that was after each decode step.
* `other_candidates`: a negative control. The drafter's candidates on rank 1 are others in step DIFFERING_STEP.
* `other_manifest`: a negative control. Rank 1 finds a manifest with another patch set.
* `finite`: counts rows of logits that hold a NaN, on the GPU; `watch` writes the count down.

A server that is started by sglang.launch_server takes them as a plugin of SGLang's: see `as_plugin`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

NAMES, WATCH, STEPS = "TV_E2E_HOOKS", "TV_E2E_WATCH", "TV_E2E_STEPS"
PLUGINS = "sglang.srt.plugins"

RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}  # fmt: skip
"""Arguments of SGLang in newer releases."""

DIFFERING_STEP = 5
OTHER_PATCH_SET = "0123456789ab" * 5 + "0123"
TP_RANK = 3
"""Place of the rank among the arguments of SGLang's run_scheduler_process."""


def engine(hooks: tuple[str, ...], arguments: dict[str, Any]) -> Any:
    """A started Engine with these hooks. Arguments by the names they have in v0.5.12.post1."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    known = ServerArgs.__dataclass_fields__
    arguments = {name if name in known else RENAMED.get(name, name): value for name, value in arguments.items()}

    os.environ[NAMES] = " ".join(hooks)

    class Hooked(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    return Hooked(**arguments)


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """What SGLang starts as its scheduler process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install(arguments[TP_RANK])
    return run_scheduler_process(*arguments, **more)


def as_plugin() -> None:
    """What SGLang calls in each of its processes (entry point group PLUGINS): prepares a single GPU's scheduler."""
    if multiprocessing.parent_process() is not None:
        install(rank=0)


def install(rank: int) -> None:
    """Prepares this process with the hooks that $TV_E2E_HOOKS names."""
    hooks = {
        "native": native, "causal": causal, "unmoved": unmoved, "alternate": alternate, "watch": watch,
        "finite": finite, "steps": lambda: steps(rank), "other_candidates": lambda: other_candidates(rank),
        "other_manifest": lambda: other_manifest(rank),
    }  # fmt: skip
    for name in os.environ.get(NAMES, "").split():
        hooks[name]()


def native() -> None:
    """Plain PyTorch for what has half-precision kernels only."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.models import utils

    for module in (RMSNorm, RotaryEmbedding, SiluAndMul):
        module.forward_cuda = module.forward_native
    utils.can_use_fused_inplace_qknorm = lambda head_dim, dtype: False


def causal() -> None:
    """A mask that lets nodes see each other's branches."""
    from sglang.srt.treeverify.ddtree import verify_input

    honest = verify_input.full_mask
    verify_input.full_mask = lambda visible, prefix_lens: honest(visible.new_ones(visible.shape).tril(), prefix_lens)


def unmoved() -> None:
    """No KV moves."""
    from sglang.srt.treeverify.kv.pools import Mover

    Mover.__call__ = lambda self, *arguments, **more: None


def compact() -> None:
    """Whatever lies in pieces is moved together, every fourth step."""
    from sglang.srt.treeverify.kv import upkeep

    upkeep.POLICY = upkeep.Policy(tokens=2, left=1, run=1 << 20, steps=4)


def alternate() -> None:
    """All widths in turn; the real choice is made, and not followed."""
    from sglang.srt.treeverify.ddtree.budget.controller import Budget

    choose, steps = Budget.choose, itertools.count()

    def turn(self: Any, *arguments: Any) -> int:
        choose(self, *arguments)
        return next(steps) % len(self.widths)

    Budget.choose = turn


def watch() -> None:
    """Appends `pools` of an idle scheduler to the watch file, once for every change."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    path, seen = Path(os.environ[WATCH]), {"state": None, "retracted": 0, "batch_sizes": set()}
    on_idle, retract, run_batch = Scheduler.on_idle, ScheduleBatch.retract_decode, Scheduler.run_batch

    def idle(self: Any) -> None:
        on_idle(self)  # SGLang's own check, which raises on a leak
        state = (self.forward_ct, self.token_to_kv_pool_allocator.available_size())
        if self.is_fully_idle() and state != seen["state"]:
            seen["state"] = state
            sizes = sorted(seen["batch_sizes"])
            line = {**pools(self), **memory(), "retracted": seen["retracted"], "batch_sizes": sizes}
            if "count" in _nan_rows:
                line["nan_rows"] = int(_nan_rows["count"])
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        result = retract(self, *arguments, **more)
        seen["retracted"] += len(result[0])
        return result

    def ran(self: Any, batch: Any, *arguments: Any, **more: Any) -> Any:
        if batch.forward_mode.is_decode():
            seen["batch_sizes"].add(batch.batch_size())
        return run_batch(self, batch, *arguments, **more)

    Scheduler.on_idle, ScheduleBatch.retract_decode, Scheduler.run_batch = idle, counted, ran


_nan_rows: dict[str, Any] = {}
"""`count`: rows of logits so far that hold a NaN, a tensor; only under the hook `finite`."""


def finite() -> None:
    """Counts rows of logits that hold a NaN, after every pass of target and drafter; the host does not wait for it."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward, _nan_rows["count"] = ModelRunner.forward, 0

    def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        result = forward(self, *arguments, **more)
        logits = getattr(result.logits_output, "next_token_logits", None)
        if logits is not None:
            _nan_rows["count"] = logits.isnan().any(-1).sum() + _nan_rows["count"]
        return result

    ModelRunner.forward = counted


def steps(rank: int) -> None:
    """Writes down what became of every request on this rank, and how its output grew."""
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin as Results

    path, growing, ended = Path(f"{os.environ[STEPS]}.rank{rank}.jsonl"), {}, set()
    path.write_text("")
    process = Results.process_batch_result_decode

    def noted(self: Any, batch: Any, result: Any) -> None:
        requests = list(batch.reqs)
        process(self, batch, result)
        for req in requests:
            if req.rid in ended:  # overlap scheduling meets it once more
                continue
            growing.setdefault(req.rid, []).append(len(req.output_ids_through_stop))
            if req.finished():
                ended.add(req.rid)
                line = {"rid": req.rid, "growth": growing.pop(req.rid), "output": list(req.output_ids_through_stop)}
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")

    Results.process_batch_result_decode = noted


def other_candidates(rank: int) -> None:
    """Rank 1 drafts other tokens, once."""
    from sglang.srt.treeverify.ddtree.tree import Candidates, DraftTree

    honest, count = DraftTree.build, itertools.count(1)  # once a step

    def differing(candidates: Candidates, *arguments: Any, **more: Any) -> DraftTree:
        if next(count) == DIFFERING_STEP and rank == 1:
            candidates = candidates._replace(ids=candidates.ids ^ 1)
        return honest(candidates, *arguments, **more)

    DraftTree.build = staticmethod(differing)


def other_manifest(rank: int) -> None:
    """Rank 1 looks for its manifest in another folder, where the patch set is another one."""
    from sglang.srt.treeverify import ranks

    if rank != 1:
        return
    manifest = json.loads(Path(ranks.__file__).with_name("_manifest.json").read_text())
    folder = Path(tempfile.mkdtemp())
    (folder / "_manifest.json").write_text(json.dumps({**manifest, "patch_set": OTHER_PATCH_SET}))
    ranks.__file__ = str(folder / "ranks.py")


def pools(scheduler: Any) -> dict[str, Any]:
    """Where the slots of an idle scheduler are: free, or held by the radix cache; and its rows of req_to_token.

    `each_once`: free and cached slots together are every slot of the pool, each exactly once.
    """
    import torch

    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    page = allocator.page_size
    pages = torch.cat([allocator.free_pages, allocator.release_pages])
    free = (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()
    cached = cache.all_values_flatten() if cache.root_node.children else free[:0]
    together = torch.cat([free, cached.to(free)]).sort().values
    whole = torch.arange(page, allocator.size + page, dtype=together.dtype, device=together.device)
    return {
        "total": int(allocator.size), "free": len(free), "cached": len(cached),
        "each_once": together.shape == whole.shape and bool(torch.equal(together, whole)),
        "rows": int(scheduler.req_to_token_pool.size), "rows_free": len(scheduler.req_to_token_pool.free_slots),
        "steps": int(scheduler.forward_ct),
    }  # fmt: skip


def memory() -> dict[str, int]:
    """Bytes that PyTorch has handed out on the GPU, and that it holds, and the process's resident set."""
    import psutil
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated() if gpu else 0,
        "reserved": torch.cuda.memory_reserved() if gpu else 0,
        "resident": psutil.Process().memory_info().rss,
    }
