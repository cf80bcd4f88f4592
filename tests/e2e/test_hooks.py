# SPDX-License-Identifier: Apache-2.0
"""What the stages do to a scheduler process, on real SGLang without a GPU: hooks, the pool's books, arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from worker import Worker

DATA = Path(__file__).resolve().parents[1] / "data" / "tiny_mla"


@pytest.fixture(scope="module")
def patched(patched_tree: Path) -> Iterator[Worker]:
    worker = Worker(patched_tree)
    yield worker
    worker.close()


def causal_mask() -> list[list[int]]:
    import scheduler_hooks
    import torch
    from sglang.srt.treeverify.ddtree import verify_input

    scheduler_hooks.causal()
    return verify_input.full_mask(torch.eye(3, dtype=torch.bool)[None], [2]).view(3, 5).int().tolist()


def native_forms() -> list[bool]:
    import scheduler_hooks
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    scheduler_hooks.native()
    return [module.forward_cuda is module.forward_native for module in (RMSNorm, RotaryEmbedding, SiluAndMul)]


def widths_in_turn() -> list[int]:
    import scheduler_hooks
    from sglang.srt.treeverify.ddtree.budget.controller import Budget
    from sglang.srt.treeverify.ddtree.budget.curve import Costs, Curve

    own = Budget.choose
    scheduler_hooks.alternate()
    try:
        budget = Budget(Curve((8, 16, 64), (4,), {4: Costs((64,), ((1.0,), (2.0,), (3.0,)))}))
        return [budget.begin(2, 100) for _ in range(7)]
    finally:
        Budget.choose = own


def kv_moved_or_not() -> list[bool]:
    """Whether a row is where it was sent, without the hook and with it."""
    import scheduler_hooks
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.treeverify.kv.pools import Mover

    pool, found, honest = MLATokenToKVPool(32, 16, torch.bfloat16, 8, 8, 1, "cpu", False), [], Mover.__call__
    try:
        for value in (1, 2):
            pool.kv_buffer[0][20] = value
            Mover(pool)(torch.tensor([20]), torch.tensor([30]))
            found.append(bool((pool.kv_buffer[0][30] == value).all()))
            scheduler_hooks.unmoved()
    finally:
        Mover.__call__ = honest
    return found


def pool_books(wrong: str, page: int = 1) -> dict[str, Any]:
    """A pool of twelve pages, five of them in the radix cache; `wrong` says what was done to it."""
    import torch
    from scheduler_hooks import pools
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    rows = ReqToTokenPool(4, 8, "cpu", False)
    if page == 1:
        allocator = TokenToKVPoolAllocator(12, torch.float32, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(12 * page, page, torch.float32, "cpu", None, False)
    cache = RadixCache(CacheInitParams(False, rows, allocator, page))
    if wrong != "nothing cached":
        cache.insert(InsertParams(key=RadixKey([7, 8, 9, 7, 7] * page), value=allocator.alloc(5 * page)))
    if wrong == "leak":
        allocator.alloc(page)
    if wrong == "freed twice":
        allocator.free(torch.tensor([9 * page]))
    if wrong == "leak and freed twice":
        allocator.alloc(page)
        allocator.free(torch.tensor([9 * page]))
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, tree_cache=cache, req_to_token_pool=rows, forward_ct=3
    )
    return pools(scheduler)


def completed(arguments: dict[str, Any]) -> list[int]:
    from mla_rig import server_args
    from sglang.srt.treeverify.ddtree import algorithm

    args = server_args(**arguments, device="cpu")
    algorithm.complete(args)
    return [args.speculative_num_draft_tokens, args.speculative_dflash_block_size, args.max_running_requests]


def rows_with_nan() -> list[int]:
    """What is counted after each of three passes, one without logits."""
    import scheduler_hooks
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    honest, nan, counts = ModelRunner.forward, float("nan"), []
    ModelRunner.forward = lambda self, logits: SimpleNamespace(
        logits_output=SimpleNamespace(next_token_logits=logits)
    )
    try:
        scheduler_hooks.finite()
        for logits in (torch.tensor([[1.0, nan], [0.0, 1.0], [nan, nan]]), None, torch.ones(2, 2)):
            assert ModelRunner.forward(None, logits).logits_output.next_token_logits is logits
            counts.append(int(scheduler_hooks._nan_rows["count"]))
    finally:
        ModelRunner.forward = honest
    return counts


def hooks_of_a_plugin(folder: str) -> list[bool]:
    """Whether SGLang finds the plugin, and whether that hooks a process of its own, and one that is another's child."""
    import multiprocessing
    import os

    import scheduler_hooks
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins import load_plugins_by_group

    sys.path.append(folder)
    own, parent, found = ModelRunner.forward, multiprocessing.parent_process, []
    os.environ[scheduler_hooks.NAMES] = "finite"
    try:
        call, name = load_plugins_by_group(scheduler_hooks.PLUGINS)["treeverify-hooks"]
        for is_child in (False, True):
            multiprocessing.parent_process = lambda is_child=is_child: object() if is_child else None
            call()
            found.append(ModelRunner.forward is not own)
    finally:
        ModelRunner.forward, multiprocessing.parent_process = own, parent
        sys.path.remove(folder)
    return [name == "treeverify-hooks", *found]


def at_rest() -> dict[str, int]:
    import scheduler_hooks

    return scheduler_hooks.memory()


def parsed(lines: list[list[str]], names: list[list[str]]) -> list[list[Any]]:
    """What sglang.launch_server makes of these command lines: the values of the arguments named."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    taken = [vars(parser.parse_args(words)) for words in lines]
    return [[args[name] for name in own] for args, own in zip(taken, names, strict=True)]


def argument_names() -> list[str]:
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    return [field.name for field in dataclasses.fields(ServerArgs)]


def test_causal_hook_shows_nodes_each_others_branches(patched: Worker) -> None:
    assert patched(causal_mask) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_native_hook(patched: Worker) -> None:
    assert patched(native_forms) == [True] * 3


def test_unmoved_hook(patched: Worker) -> None:
    assert patched(kv_moved_or_not) == [True, False]


def test_alternate_hook_takes_all_widths_in_turn(patched: Worker) -> None:
    assert patched(widths_in_turn) == [8, 16, 64, 8, 16, 64, 8]


def test_finite_hook_counts_rows_that_hold_a_nan(patched: Worker) -> None:
    assert patched(rows_with_nan) == [2, 2, 2]


def test_hooks_are_found_as_a_plugin_and_only_in_a_child(patched: Worker, tmp_path: Path) -> None:
    import soak_server

    assert patched(hooks_of_a_plugin, folder=str(soak_server.plugin(tmp_path))) == [True, False, True]


def test_memory_at_rest(patched: Worker) -> None:
    found = patched(at_rest)
    assert set(found) == {"allocated", "reserved", "resident"} and found["resident"] > 1 << 26


def test_soaked_servers_have_flags_that_sglang_takes(patched: Worker, tmp_path: Path) -> None:
    import soak
    import soak_server

    folders = soak.Folders(DATA / "target", DATA / "draft", tmp_path)
    servers = [soak.arguments_of(soaked, folders, 1234) for soaked in soak.SERVERS.values()]
    lines, names = [soak_server.flags(arguments) for arguments in servers], [list(arguments) for arguments in servers]
    assert patched(parsed, lines=lines, names=names) == [list(arguments.values()) for arguments in servers]
    assert soak.vocabulary(tmp_path / "random_weights" / "target") == soak.vocabulary(DATA / "target")


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("wrong", ["", "nothing cached"])
def test_whole_pool(patched: Worker, wrong: str, page: int) -> None:
    import churn

    books = patched(pool_books, wrong=wrong, page=page)
    assert churn.exact_pool(books) and books["cached"] == (0 if wrong else 5 * page)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("wrong", ["leak", "freed twice", "leak and freed twice"])
def test_lost_and_doubled_slots_are_found(patched: Worker, wrong: str, page: int) -> None:
    import churn

    assert not churn.exact_pool(patched(pool_books, wrong=wrong, page=page))


def test_all_servers_have_arguments_that_sglang_takes(patched: Worker, tmp_path: Path) -> None:
    import churn
    import lossless
    import modes
    import sampling
    import tiny_gqa

    gqa = tiny_gqa.write(tmp_path)
    tables = (
        (lossless.SERVERS, lossless.ROOM),
        (sampling.SERVERS, sampling.CAPACITY),
        (churn.SERVERS, churn.SMALL),
        ({name: lossless.Server("mla", mode.arguments) for name, mode in modes.MODES.items()}, {}),
    )
    names, trees = set(patched(argument_names)), 0
    for servers, shared in tables:
        for server in servers.values():
            target, draft = gqa if server.model == "gqa" else (DATA / "target", DATA / "draft")
            arguments = modes.engine_arguments(target, draft, **{**shared, **server.arguments})
            assert set(arguments) <= names
            if arguments.get("speculative_algorithm") == "DDTREE":
                width, block, _ = patched(completed, arguments=arguments)
                assert (width, block) == (arguments["speculative_num_draft_tokens"], lossless.BLOCK)
                trees += 1
    assert trees >= 15
