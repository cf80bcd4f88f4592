# SPDX-License-Identifier: Apache-2.0
"""The drafting head on real SGLang: its tensor-parallel groups over gloo, 1 to 3 processes, beside its greedy choice.

Functions named with a leading underscore run where SGLang is imported (tests/support/worker.py).
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from worker import SUPPORT, Worker

RANKS = 3
OVERLAY = SUPPORT.parents[1] / "overlay" / "srt"


class Problem(NamedTuple):
    """A vocabulary of `base` and `added` tokens, padded to `padded_*` rows over all ranks, and hidden states.

    Integers make products exact and ties common.
    """

    base: int
    padded_base: int
    added: int = 0
    padded_added: int = 0
    rows: int = 5
    dtype: str = "bfloat16"
    hidden_dtype: str = "bfloat16"
    integers: bool = True
    seed: int = 0

    @property
    def vocab(self) -> int:
        return self.base + self.added

    def hidden(self) -> torch.Tensor:
        """[rows, 16]"""
        return self._numbers(self.rows, 1).to(getattr(torch, self.hidden_dtype))

    def weight(self) -> torch.Tensor:
        """[base + added, 16]: the head's, without padding"""
        return self._numbers(self.vocab, 2).to(getattr(torch, self.dtype))

    def _numbers(self, rows: int, stream: int) -> torch.Tensor:
        gen = torch.Generator().manual_seed(10 * self.seed + stream)
        if self.integers:
            return torch.randint(-2, 3, (rows, 16), generator=gen).float()
        return torch.randn(rows, 16, generator=gen)

    def logits(self) -> torch.Tensor:
        """float64 [rows, base + added]"""
        return self.hidden().to(self.weight().dtype).double() @ self.weight().double().T


PROBLEMS = {
    "even": Problem(96, 96),
    "padding": Problem(83, 96),
    "one_rank_is_short": Problem(70, 96),
    "ranks_without_a_token": Problem(7, 96),
    "many_rows": Problem(83, 96, rows=300),
    "cast": Problem(83, 96, hidden_dtype="float32"),
    "fp16": Problem(83, 96, dtype="float16", hidden_dtype="float16"),
    "fp32": Problem(83, 96, dtype="float32", integers=False),
    "several_lists": Problem(30_000, 30_720, integers=False, seed=4),
    "added": Problem(83, 96, 10, 12, seed=1),
    "added_on_one_rank": Problem(83, 96, 3, 12, rows=40, seed=2),
    "added_to_few": Problem(2, 96, 3, 12, rows=40, seed=3),
}
SIZES = [1, 2, 3]
WIDTHS = [1, 7, 60, 255]


def _run(folder: str) -> None:
    """Forks a process a rank from this one, where SGLang is imported; their answers go to files in `folder`."""
    from absent_kernels import absent

    absent()
    importlib.import_module("sglang.srt.speculative.dflash_worker")
    with multiprocessing.get_context("fork").Pool(RANKS) as pool:
        pool.starmap(_answer, [(rank, Path(folder)) for rank in range(RANKS)], chunksize=1)


def _answer(rank: int, folder: Path) -> None:
    """Joins the others, which leaves one call to each process, and drafts for every problem."""
    import torch.distributed as dist

    store = folder / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = {ranks: _coordinator(rank, ranks) for ranks in SIZES}
    answers = {
        (name, ranks, k): _draft(rank, groups[ranks], PROBLEMS[name], k)
        for ranks in SIZES
        for name in PROBLEMS
        for k in WIDTHS
        if rank < ranks
    }
    torch.save(answers, folder / f"{rank}.pt")
    dist.barrier()


def _coordinator(rank: int, ranks: int) -> Any:
    """SGLang's coordinator of the first `ranks` processes; the others get one that nobody uses.

    It gathers as on cards without CUDA: the op that it goes through otherwise is registered for CUDA only.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    off = ("pynccl", "pymscclpp", "custom_allreduce", "torch_symm_mem_all_reduce")
    off += ("hpu_communicator", "xpu_communicator", "npu_communicator")
    groups = [list(range(ranks)), *([other] for other in range(ranks, RANKS))]
    group = GroupCoordinator(groups, rank, "gloo", **{f"use_{name}": False for name in off}, group_name=f"head{ranks}")
    group.all_gather_into_tensor = group._all_gather_into_tensor
    return group


def _shard(problem: Problem, rank: int, ranks: int) -> SimpleNamespace:
    """SGLang's own shard of the head; what pads it would win if it counted."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padded = problem.padded_base + problem.padded_added
    shard = VocabParallelEmbedding._get_indices(padded, problem.padded_base, problem.vocab, problem.base, rank, ranks)
    whole = problem.weight()
    weight = torch.full((shard.num_elements_padded, whole.shape[1]), 99.0, dtype=whole.dtype)
    weight[: shard.num_org_elements] = whole[shard.org_vocab_start_index : shard.org_vocab_end_index]
    added = weight[shard.num_org_elements_padded :][: shard.num_added_elements]
    added.copy_(whole[shard.added_vocab_start_index : shard.added_vocab_end_index])
    return SimpleNamespace(weight=weight, shard_indices=shard)


def _draft(rank: int, group: Any, problem: Problem, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids and log-probabilities that this rank gets, and the tokens that DFlash's greedy choice gives it."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.speculative.dflash_worker import DFlashWorker
    from treeverify.ddtree.head import TopKHead

    head, hidden = _shard(problem, rank, group.world_size), problem.hidden()
    parallel_state._TP = group  # what get_tp_group() returns, to both
    ids, logprobs = TopKHead(k)(hidden, head)
    buffers = ("gathered_max", "gathered_ids", "best_rank", "rank_index", "selected_ids")
    worker = SimpleNamespace(**{f"_draft_greedy_{name}_buf": None for name in buffers})
    worker._draft_greedy_gather_cap = worker._draft_greedy_index_cap = 0
    greedy = DFlashWorker._greedy_sample_from_vocab_parallel_head(worker, hidden_states=hidden, lm_head=head)
    return ids, logprobs, greedy


Answers = list[dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


@pytest.fixture(scope="module")
def answers(stock_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each rank got, by problem, number of ranks and k."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join(map(str, (stock_tree, SUPPORT, OVERLAY)))
    worker = Worker(stock_tree, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    worker(_run, folder=str(folder))
    worker.close()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_of_the_whole_vocabulary(answers, name, ranks, k):
    problem = PROBLEMS[name]
    results = [answers[rank][name, ranks, k] for rank in range(ranks)]
    ids, logprobs, greedy = results[0]
    for other in results[1:]:
        assert torch.equal(other[0], ids) and torch.equal(other[1].view(torch.int32), logprobs.view(torch.int32))

    logits = problem.logits()
    known = min(k, problem.vocab)
    assert (ids[:, known:] == -1).all() and (logprobs[:, known:] == -math.inf).all()
    ids, logprobs = ids[:, :known], logprobs[:, :known]
    assert all(len(set(row)) == known for row in ids.tolist())
    step = 2**-8 if problem.dtype == "bfloat16" else 2**-20  # what a logit loses when the product is rounded
    exact = 0 if problem.integers else float(logits.abs().max()) * step
    expected = logits.log_softmax(1)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, ids), rtol=0, atol=1e-5 + 2 * exact)
    if problem.integers:
        order = logits.sort(dim=1, descending=True, stable=True).indices
        assert torch.equal(ids, order[:, :known])
    else:
        kth = expected.sort(dim=1, descending=True).values[:, known - 1 : known]
        assert (expected.gather(1, ids) >= kth - 2 * exact).all() and (logprobs.diff(dim=1) <= 0).all()

    other = (greedy != ids[:, 0]).nonzero().flatten().tolist()
    assert not other or (problem.added and ranks > 1)
    for row in other:  # a lower rank's added token, as likely as a later rank's base token, which has the smaller id
        assert logits[row, greedy[row]] == logits[row, ids[row, 0]] == logits[row].max()
        assert ids[row, 0] < problem.base <= greedy[row]
