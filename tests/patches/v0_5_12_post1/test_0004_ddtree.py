# SPDX-License-Identifier: Apache-2.0
"""0004: a step of DDTREE commits exactly the path that the target takes; ../test_ddtree.py has what all pins share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker import Worker


def policy(algorithm: str) -> bool:
    """Whether a captured verify pass of FlashInfer's MHA backend gets a mask."""
    from mla_rig import server_args
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    server_args(speculative_algorithm=algorithm)
    return resolve_dflash_verify_mask_policy(type("FlashInferAttnBackend", (), {})())[1]


def test_captured_passes_of_trees_have_a_mask(patched: Worker) -> None:
    assert patched(policy, algorithm="DDTREE") and not patched(policy, algorithm="DFLASH")


def hook(topk: int, width: int) -> dict[str, Any]:
    """What DDTREE's worker makes of candidates where DFLASH's would verify a chain of 8; the real methods."""
    import torch
    from absent_kernels import absent

    absent()
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.dflash_worker import DFlashWorker
    from sglang.srt.treeverify.ddtree.masks import MaskForm
    from sglang.srt.treeverify.ddtree.stats import Stats
    from sglang.srt.treeverify.ddtree.tree import Candidates
    from sglang.srt.treeverify.ddtree.worker import DDTreeWorker

    assert DFlashWorker.make_verify_input is DFlashVerifyInput
    worker = object.__new__(DDTreeWorker)
    bs, block = 3, 8
    ids = torch.stack([torch.randperm(50)[:topk] for _ in range(bs * (block - 1))]).view(bs, block - 1, topk)
    logprobs = torch.log_softmax(torch.randn(bs, block - 1, 50), -1).topk(topk).values
    worker.__dict__.update(
        _candidates=Candidates(ids, logprobs), _width=width, _mask_form=MaskForm.PACKED, tree_stats=Stats("cpu"),
        block_size=block, model_runner=type("", (), {"sampler": None}), _checks_ranks=False, _steps=0,
    )  # fmt: skip
    chain = torch.cat([torch.tensor([[90], [91], [92]]), ids[:, :, 0]], 1)
    positions = torch.tensor([5, 60, 7])[:, None] + torch.arange(block)
    made = worker.make_verify_input(
        draft_token=chain.view(-1), positions=positions.view(-1), draft_token_num=block
    )
    assert made.packed_mask is made.tree.mask and made.custom_mask is None
    return {
        "is_chain": torch.equal(made.draft_token, chain.view(-1)) and torch.equal(made.positions, positions.view(-1)),
        "causal": torch.equal(made.tree.visible(), torch.ones(width, width).tril().bool().expand(bs, -1, -1)),
        "width": made.draft_token_num, "branches": bool((made.tree.next_sibling >= 0).any()),
        "in_order": bool((made.positions.view(bs, width) >= positions[:, :1]).all()),
    }  # fmt: skip


def test_one_candidate_a_position_is_the_chain_of_dflash(patched: Worker) -> None:
    made = patched(hook, topk=1, width=8)
    assert made == {"is_chain": True, "causal": True, "width": 8, "branches": False, "in_order": True}


def test_more_candidates_branch(patched: Worker) -> None:
    made = patched(hook, topk=15, width=16)
    assert made == {"is_chain": False, "causal": False, "width": 16, "branches": True, "in_order": True}


def mask_of_a_step() -> dict[str, Any]:
    """The mask handed to SGLang's own backends against one written out from the parents."""
    import torch
    from tree_batch import TreeBatch, sampling

    trees = TreeBatch([[1, 2, 3], [4, 5, 6, 7, 8]], [sampling()] * 2)
    made = trees.verify_input(trees.candidates(3, 5), 9)
    expected = []
    for b, prefix in enumerate((3, 5)):
        for i in range(9):
            row, node = [True] * prefix + [False] * 9, i
            while node >= 0:
                row[prefix + node] = True
                node = int(made.tree.parents[b, node])
            expected += row
    slots = trees.batch.out_cache_loc.view(2, 9)
    mapped = trees.requests.req_to_token[trees.batch.req_pool_indices]
    return {
        "mask": made.custom_mask.tolist() == expected,
        "mapped": torch.equal(mapped[0, 3:12].long(), slots[0]) and torch.equal(mapped[1, 5:14].long(), slots[1]),
    }


def test_the_full_mask_holds_prefix_and_ancestors(patched: Worker) -> None:
    assert patched(mask_of_a_step) == {"mask": True, "mapped": True}


def decode(noise: float, n: int, k: int, seed: int, page_size: int = 1) -> dict[str, Any]:
    """Greedy requests of different lengths to their ends, some finishing in mid-batch; accounting after each step."""
    import torch
    from tree_batch import TreeBatch, sampling

    stops = {1: [3, 9]}
    params = [sampling(max_new_tokens=20 + 7 * i, stop_token_ids=stops.get(i)) for i in range(5)]
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [7, 7], [9, 10, 11, 1, 2, 3], [1, 2, 3, 4, 5]]
    trees = TreeBatch(prompts, params, seed=seed, page_size=page_size)
    everyone, drafts, wrong = list(trees.batch.reqs), 0, []
    while trees.batch.reqs:
        step = trees.step(4, n, k, noise)
        drafts += sum(step["drafts"])
        at = 0
        for b, req in enumerate(trees.batch.reqs):
            length, before = int(step["lengths"][b]), int(step["before"][b])
            rows = step["rows"][at : at + length]
            at += length
            mapped = trees.requests.req_to_token[req.req_pool_idx, before : before + length].long()
            path = [int(row) - b * n for row in rows]
            parents = [int(step["tree"].parents[b, node]) for node in path]
            wrong += [] if parents == [-1, *path[:-1]] else [f"{path} is not a path: {parents}"]
            kept = rows if page_size == 1 else torch.arange(b * n, b * n + length)
            wrong += [] if torch.equal(mapped, step["slots"][kept]) else [f"slots of {path} are out of order"]
            wrong += [] if int(step["bonus"][b]) == req.output_ids[-1] else ["bonus"]
            wrong += [] if req.kv_committed_len == before + length == int(trees.batch.seq_lens[b]) else ["length"]
        wrong += [f"{trees.unaccounted()} slots lost"] if trees.unaccounted() else []
        trees.finish([req for req in trees.batch.reqs if req.finished()])
        wrong += [f"{trees.unaccounted()} slots lost at the end"] if trees.unaccounted() else []
    for req in everyone:  # the target alone
        text = list(req.origin_input_ids)
        while len(text) < len(req.origin_input_ids) + len(req.output_ids):
            text.append(int(trees.table[text[-2], text[-1]].argmax()))
        wrong += [] if text == req.origin_input_ids + req.output_ids else [f"{req.rid} differs from the target alone"]
    reasons = [type(req.finished_reason).__name__ for req in everyone]
    lengths = [len(req.output_ids) for req in everyone]
    return {"wrong": wrong, "drafts": drafts, "reasons": reasons, "lengths": lengths}


@pytest.mark.parametrize(
    "noise, n, k, seed, page_size",
    [
        *((*case, seed, 1) for case in ((0.5, 12, 6), (3.0, 5, 12), (0.0, 33, 12)) for seed in range(3)),
        (0.5, 12, 6, 0, 16),
        (0.0, 33, 12, 1, 32),
        (0.5, 12, 6, 2, 64),
    ],
)
def test_greedy_output_is_the_targets_and_no_slot_is_lost(
    patched: Worker, noise: float, n: int, k: int, seed: int, page_size: int
) -> None:
    found = patched(decode, noise=noise, n=n, k=k, seed=seed, page_size=page_size)
    assert found["wrong"] == []
    assert found["drafts"] > 0
    assert found["reasons"][0] == "FINISH_LENGTH"
    assert found["lengths"][0] == 20


def law(top_k: int, judged_at: list[float]) -> list[float]:
    """p-values of the joint law of two new tokens (a step or two, trees of depth 3), judged at these temperatures."""
    import torch
    from tree_batch import VOCABULARY, TreeBatch, sampling

    bs, runs, counts = 32, 40, torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for seed in range(runs):
        params = [sampling(temperature=1.0, top_k=top_k, max_new_tokens=3) for _ in range(bs)]
        trees = TreeBatch([[1, 2]] * bs, params)
        torch.manual_seed(seed)
        trees.generator.manual_seed(seed)
        everyone = trees.batch.reqs
        while trees.batch.reqs:
            trees.step(3, 9, 6)
            trees.finish([req for req in trees.batch.reqs if req.finished()])
        for req in everyone:
            counts[req.output_ids[1], req.output_ids[2]] += 1
    first = int(trees.table[1, 2].argmax())

    def row(before: int, token: int, temperature: float) -> torch.Tensor:
        logits = trees.table[before, token].double() / temperature
        if top_k > 0:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
        return torch.softmax(logits, -1)

    p_values = []
    for temperature in judged_at:
        one = row(2, first, temperature)
        due = torch.stack([one[a] * row(first, a, temperature) for a in range(VOCABULARY)]) * counts.sum()
        likely = due >= 5
        seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
        due = torch.cat([due[likely], due[~likely].sum()[None]])
        seen, due = seen[due > 0], due[due > 0]
        statistic, freedom = ((seen - due) ** 2 / due).sum(), torch.tensor(len(due) - 1.0, dtype=torch.float64)
        p_values.append(float(torch.special.gammaincc(freedom / 2, statistic / 2)))
    return p_values


@pytest.mark.parametrize("top_k", [-1, 4])
def test_sampled_output_has_the_targets_law(patched: Worker, top_k: int) -> None:
    its_own, warmer = patched(law, top_k=top_k, judged_at=[1.0, 1.4])
    assert its_own > 1e-3
    assert warmer < 1e-6, "the check can fail"


def _drawn(rank: int, folder: str) -> list[list[int]]:
    """Tokens of a sampled and of a greedy batch on one of two ranks, whose generators differ."""
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.treeverify.ddtree.sampling import predict
    from tree_batch import VOCABULARY, TreeBatch, sampling

    tokens = []
    for temperature in (1.0, 0.0):
        trees = TreeBatch([[1, 2], [3, 4]], [sampling(temperature=temperature)] * 2)
        if temperature:  # from here on this is one of two
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", rank, "gloo")
            parallel_state.initialize_model_parallel(2, backend="gloo")
        torch.manual_seed(rank)
        output = LogitsProcessorOutput(torch.zeros(2 * 40, VOCABULARY), None)
        tree = SimpleNamespace(tokens=torch.zeros(2, 40), positions=torch.arange(80).view(2, 40))
        drawn = predict(output, trees.batch.sampling_info, tree, trees.sampler)
        tokens.append(drawn.flatten().tolist())
    return tokens


def drawn_by_two_ranks(folder: str) -> list[list[list[int]]]:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.starmap(_drawn, [(rank, folder) for rank in range(2)], chunksize=1)


def test_ranks_draw_the_same_tokens(patched_tree: Path, tmp_path: Path) -> None:
    fresh = Worker(patched_tree)  # torch's threads do not survive a fork
    (sampled, greedy), others = fresh(drawn_by_two_ranks, folder=str(tmp_path))
    fresh.close()
    assert others == [sampled, greedy]
    assert len(set(sampled)) > 6 and set(greedy) == {0}


def nan_is_told() -> dict[str, Any]:
    import logging

    from tree_batch import TreeBatch, sampling

    trees = TreeBatch([[1, 2, 3], [4, 5, 6]], [sampling()] * 2)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.srt.treeverify.ddtree.verify_input").addHandler(handler)
    drawn = trees.candidates(3, 4)
    drawn.logprobs[1, 2, 0] = float("nan")
    trees.candidates = lambda *_: drawn  # type: ignore[method-assign]
    step = trees.step(3, 6, 4, 0.0)
    return {"told": told, "lengths": step["lengths"].tolist(), "lost": trees.unaccounted()}


def test_nan_of_the_drafter_is_told_and_not_walked(patched: Worker) -> None:
    found = patched(nan_is_told)
    assert len(found["told"]) == 1 and "NaN for 1;" in found["told"][0]
    assert found["lengths"][1] == 1 and found["lost"] == 0


def penalised(n: int, eos: int | None, **parameters: Any) -> dict[str, Any]:
    """Greedy output under penalties and biases, and the target's alone, which is penalised token by token."""
    import torch
    from tree_batch import VOCABULARY, TreeBatch, sampling

    asked = {"max_new_tokens": 30, "min_new_tokens": 0, **parameters}
    trees = TreeBatch([[1, 2, 3], [4, 5, 6, 7]], [sampling(**asked), sampling(max_new_tokens=25)], eos=eos)
    everyone, drafts = list(trees.batch.reqs), 0
    while trees.batch.reqs:
        drafts += sum(trees.step(4, n, 8)["drafts"])
        trees.finish([req for req in trees.batch.reqs if req.finished()])
    expected = []
    for req, own in zip(everyone, (asked, {}), strict=True):
        text = [*req.origin_input_ids, req.output_ids[0]]
        while len(written := text[len(req.origin_input_ids) :]) < req.sampling_params.max_new_tokens:
            logits = trees.table[text[-2], text[-1]].clone()
            counts = torch.bincount(torch.tensor(written), minlength=VOCABULARY).float()
            logits -= own.get("frequency_penalty", 0.0) * counts + own.get("presence_penalty", 0.0) * (counts > 0)
            by = torch.where(counts > 0, own.get("repetition_penalty", 1.0), 1.0)
            logits = torch.where(logits < 0, logits * by, logits / by)
            if eos is not None and len(written) < own.get("min_new_tokens", 0):
                logits[eos] = float("-inf")
            for token, bias in own.get("logit_bias", {}).items():
                logits[int(token)] += bias
            text.append(int(logits.argmax()))
            if text[-1] == eos:
                break
        expected.append(text[len(req.origin_input_ids) :])
    return {"output": [req.output_ids for req in everyone], "expected": expected, "drafts": drafts}


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.7},
    {"repetition_penalty": 1.6},
    {"min_new_tokens": 18},
    {"logit_bias": {"3": 2.5, "7": -100.0}},
    {"frequency_penalty": -0.4, "presence_penalty": 1.1, "repetition_penalty": 1.3, "min_new_tokens": 9},
]


@pytest.mark.parametrize("parameters", PENALTIES, ids=lambda value: "-".join(value))
def test_penalties_follow_a_nodes_own_path(patched: Worker, parameters: dict[str, Any]) -> None:
    eos = 11 if "min_new_tokens" in parameters else None
    found, plain = patched(penalised, n=14, eos=eos, **parameters), patched(penalised, n=14, eos=eos)
    assert found["output"] == found["expected"]
    assert found["drafts"] > 3
    assert found["output"][0] != plain["output"][0], "it makes a difference"
    assert found["output"][1] == plain["output"][1], "to the request that asks for it"


def room() -> list[int]:
    """Where the worker ends requests whose mask Triton's graphs hold."""
    from absent_kernels import absent

    absent()
    from sglang.srt.treeverify.ddtree import worker

    ours = object.__new__(worker.DDTreeWorker)
    ours.__dict__.update(_width=16, target_worker=SimpleNamespace(max_req_len=999, max_req_input_len=994))
    ours._leave_room(1000)
    return [ours.target_worker.max_req_len, ours.target_worker.max_req_input_len]


def test_requests_end_a_tree_before_the_context(patched: Worker) -> None:
    assert patched(room) == [984, 979]
