# SPDX-License-Identifier: Apache-2.0
"""topk_lists and topk_merge on the CPU against a ranking by hand; errors and fakes."""

from __future__ import annotations

import math

import head_cases
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from treeverify.ddtree import head_ops

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([8191, 8192, 8193, 16384, 20001]))


def ranking(row: list[float]) -> list[int]:
    """Columns from the largest on, of equal ones the first first; NaN is above all."""
    return sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i))


def log_sum_exp(row: list[float]) -> float:
    if any(math.isnan(x) for x in row):
        return math.nan
    largest = max(row)
    if math.isinf(largest):
        return largest
    return largest + math.log(math.fsum(math.exp(x - largest) for x in row))


@settings(deadline=None, max_examples=50)
@given(
    kind=st.sampled_from(head_cases.KINDS),
    vocab=SIZES,
    k=st.integers(1, 255),
    dtype=st.sampled_from(head_cases.DTYPES),
    first_id=st.sampled_from([0, 5, 2**31 - 2**15]),
    seed=st.integers(0, 9),
)
@example(kind="deep", vocab=20_001, k=15, dtype=torch.bfloat16, first_id=0, seed=0)
def test_ranks_and_log_probabilities(kind, vocab, k, dtype, first_id, seed):
    x = head_cases.logits(kind, 2, vocab, dtype, seed)
    ids, logprobs = head_cases.topk(x, k, first_id)
    for b, row in enumerate(x.tolist()):
        best, lse = ranking(row)[:k], log_sum_exp(row)
        missing = k - len(best)
        assert ids[b].tolist() == [first_id + i for i in best] + [-1] * missing
        expected = torch.tensor([row[i] - lse for i in best] + [-math.inf] * missing)
        head_cases.check_logprobs(logprobs[b], expected, x)


@pytest.mark.parametrize("kind", head_cases.KINDS)
@pytest.mark.parametrize("dtype", head_cases.DTYPES)
def test_the_first_is_argmax(kind, dtype):
    x = head_cases.logits(kind, 5, 30_000, dtype, seed=3)
    assert torch.equal(head_cases.topk(x, 1)[0][:, 0], x.argmax(1))


@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 299), min_size=1, max_size=4), k=st.integers(1, 40))
def test_a_vocabulary_in_pieces(seed, cuts, k):
    """Pieces of any size and in any order, each with its list and empty ones, merge to what the whole gives."""
    x = head_cases.logits("ties", 3, 300, torch.float32, seed)
    edges = [0, *sorted(set(cuts)), 300]
    lists = head_cases.empty_lists(3, 2 * (len(edges) - 1), k)
    for i, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
        head_ops.topk_lists(x[:, begin:end], begin, lists[:, 2 * i : 2 * i + 2])
    order = torch.randperm(lists.shape[1], generator=torch.Generator().manual_seed(seed))
    lists = lists[:, order]
    whole = head_cases.topk(x, k)
    for ranks in (
        lists[None],
        lists.unflatten(1, (-1, 2)).transpose(0, 1),
    ):  # [1, rows, lists] and [lists / 2, rows, 2]
        found = head_cases.empty_result(3, k)
        head_ops.topk_merge(ranks.contiguous(), *found)
        assert torch.equal(found[0], whole[0])
        head_cases.check_logprobs(found[1], whole[1], x)


def test_candidates_compare_as_documented():
    """By value, then by the smaller id; the kernels compare the same words without a sign."""
    values = torch.tensor([-math.inf, -1e-45, -0.0, 0.0, 1e-45, 1.0, math.inf, math.nan, -math.nan])
    ids = torch.tensor([2**31 - 1, 7, 7, 7, 0, 3, 2, 9, 9])
    words = [w % 2**64 for w in head_ops._candidates(values, ids).tolist()]
    assert words == sorted(words) and words[2] == words[3] and words[7] == words[8] and words[0] > 0
    tied = [w % 2**64 for w in head_ops._candidates(torch.zeros(3), torch.tensor([0, 1, 2**31 - 1])).tolist()]
    assert tied == sorted(tied, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, "logits are torch.float64, expected bfloat16"),
        ({"logits": torch.zeros(9, 2).T}, r"logits are \(2, 9\) with strides \(1, 2\), expected"),
        ({"first_id": 2**31}, "do not fit into 31 bits"),
        ({"first_id": -1}, "do not fit into 31 bits"),
        ({"lists": torch.zeros(2, 1, 4)}, "lists is torch.float32, expected torch.int64"),
        ({"lists": torch.zeros(3, 1, 4, dtype=torch.int64)}, r"lists is \(3, 1, 4\), expected \[2, >= 1, k \+ 1\]"),
        ({"lists": torch.zeros(2, 1, 1, dtype=torch.int64)}, "k 0 is not within 1 .. 255"),
        ({"lists": torch.zeros(2, 1, 257, dtype=torch.int64)}, "k 256 is not within 1 .. 255"),
        ({"lists": torch.zeros(2, 1, 8, dtype=torch.int64)[:, :, ::2]}, "expected the lists of a row to be contiguous"),
        ({"logits": torch.zeros(2, 9000)}, r"expected \[2, >= 2, k \+ 1\]"),
    ],
)
def test_bad_lists(change, message):
    args = {"logits": torch.zeros(2, 9), "first_id": 0, "lists": torch.zeros(2, 1, 4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=f"treeverify: .*{message}"):
        head_ops.topk_lists(**{**args, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lists": torch.zeros(1, 2, 1, 4)}, "lists is torch.float32, expected torch.int64"),
        (
            {"lists": torch.zeros(1, 2, 300, 4, dtype=torch.int64)[:, :, ::2]},
            "lists has strides .* contiguous",
        ),
        ({"lists": torch.zeros(9, 2, 9999, 4, dtype=torch.int64)}, "9 ranks with 9999 lists of 3 .*; lower k"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int64)}, r"ids is \(2, 4\), expected \(2, 3\)"),
        ({"ids": torch.zeros(2, 3)}, "ids is torch.float32, expected torch.int64"),
        ({"logprobs": torch.zeros(2, 3).half()}, "logprobs is torch.float16, expected torch.float32"),
    ],
)
def test_bad_merge(change, message):
    args = {"lists": torch.zeros(1, 2, 1, 4, dtype=torch.int64), "ids": torch.zeros(2, 3).long()}
    with pytest.raises(ValueError, match=f"treeverify: .*{message}"):
        head_ops.topk_merge(**{**args, "logprobs": torch.zeros(2, 3), **change})


def test_fakes():
    with FakeTensorMode():
        lists = torch.empty(2, 3, 8, dtype=torch.int64)
        assert head_ops.topk_lists(torch.empty(2, 20_000), 0, lists) is None
        result = torch.empty(2, 7, dtype=torch.int64), torch.empty(2, 7)
        assert head_ops.topk_merge(lists[None], *result) is None
