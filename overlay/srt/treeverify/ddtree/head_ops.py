# SPDX-License-Identifier: Apache-2.0
"""torch.ops.treeverify.topk_lists and topk_merge: the k largest logits of each row, and their log-probabilities.

The first reads the logits once and leaves a *list* for every SLICE of the vocabulary; the second merges the lists of a
row. Lists name tokens by their global ids, so those of the added vocabulary and of other ranks merge the same way.

A list is k + 1 words of 64 bits: k candidates, best first, 0 where the slice has no more, then the sum of
exp(logit - base) as fp32 bits, base being the slice's largest logit, or 0 where that is infinite. A candidate is the
logit as an integer that compares as the logit does, NaN above all, over the complement of the id: the larger of two has
the larger logit or, of equal ones, the smaller id. This is torch.argmax's rule, at every place.

On CUDA the ops only launch. On the CPU plain torch answers: the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..attention.checks import check, not_dense, not_typed
from ..attention.launch import launch
from . import head_abi
from .head_abi import MAX_K, MAX_MERGED, SLICE

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LOW = 0xFFFFFFFF
_MAX_ROWS = 65535
_MAX_IDS = 2**31

_lib = torch.library.Library("treeverify", "FRAGMENT")
_lib.define("topk_lists(Tensor logits, int first_id, Tensor(a!) lists) -> ()")
_lib.define("topk_merge(Tensor lists, Tensor(a!) ids, Tensor(b!) logprobs) -> ()")


def list_count(vocab: int) -> int:
    """Lists that a row of `vocab` logits takes."""
    return -(-vocab // SLICE)


def _lists_problems(logits: torch.Tensor, first_id: int, lists: torch.Tensor) -> Iterator[str]:
    if logits.dim() != 2 or logits.shape[1] < 1 or logits.stride(1) != 1:
        yield f"logits are {tuple(logits.shape)} with strides {logits.stride()}, expected [rows, V >= 1] with (any, 1)"
    rows, vocab = logits.shape
    if logits.dtype not in DTYPES:
        yield f"logits are {logits.dtype}, expected bfloat16, float16 or float32"
    if rows > _MAX_ROWS:
        yield f"{rows} rows are more than {_MAX_ROWS}; pass them in pieces"
    if not 0 <= first_id <= _MAX_IDS - vocab:
        yield f"ids {first_id} .. {first_id + vocab - 1} do not fit into 31 bits"
    yield from not_typed(torch.int64, lists=lists)
    if lists.dim() != 3 or lists.shape[0] != rows or lists.shape[1] < list_count(vocab):
        yield f"lists is {tuple(lists.shape)}, expected [{rows}, >= {list_count(vocab)}, k + 1]"
    yield from _wrong_k(lists)
    if lists.stride()[1:] != (lists.shape[2], 1):
        yield f"lists has strides {lists.stride()}, expected the lists of a row to be contiguous"
    if logits.device != lists.device:
        yield f"lists is on {lists.device}, expected {logits.device}"


def _merge_problems(lists: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> Iterator[str]:
    yield from not_typed(torch.int64, lists=lists, ids=ids)
    yield from not_typed(torch.float32, logprobs=logprobs)
    yield from not_dense(lists=lists, ids=ids, logprobs=logprobs)
    if lists.dim() != 4:
        yield f"lists is {tuple(lists.shape)}, expected [ranks, rows, lists, k + 1]"
    yield from _wrong_k(lists)
    ranks, rows, count, words = lists.shape
    k = words - 1
    if not 1 <= ranks * count * k <= MAX_MERGED:
        yield f"{ranks} ranks with {count} lists of {k} are not within 1 .. {MAX_MERGED} candidates a row; lower k"
    for name, t in (("ids", ids), ("logprobs", logprobs)):
        if t.shape != (rows, k):
            yield f"{name} is {tuple(t.shape)}, expected {(rows, k)}"


def _wrong_k(lists: torch.Tensor) -> Iterator[str]:
    if not 1 <= lists.shape[-1] - 1 <= MAX_K:
        yield f"k {lists.shape[-1] - 1} is not within 1 .. {MAX_K}"


def _lists_cuda(logits: torch.Tensor, first_id: int, lists: torch.Tensor) -> None:
    check(_lists_problems(logits, first_id, lists))
    params = head_abi.ListsParams(
        logits=logits.data_ptr(),
        lists=lists.data_ptr(),
        logits_stride=logits.stride(0),
        lists_stride=lists.stride(0),
        dtype=DTYPES[logits.dtype],
        rows=logits.shape[0],
        vocab=logits.shape[1],
        first_id=first_id,
        count=lists.shape[1],
        k=lists.shape[2] - 1,
    )
    launch("topk_lists", params, logits.device)


def _merge_cuda(lists: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    check(_merge_problems(lists, ids, logprobs))
    params = head_abi.MergeParams(
        lists=lists.data_ptr(),
        ids=ids.data_ptr(),
        logprobs=logprobs.data_ptr(),
        ranks=lists.shape[0],
        rows=lists.shape[1],
        count=lists.shape[2],
        k=lists.shape[3] - 1,
    )
    launch("topk_merge", params, lists.device)


def _lists_cpu(logits: torch.Tensor, first_id: int, lists: torch.Tensor) -> None:
    check(_lists_problems(logits, first_id, lists))
    k = lists.shape[2] - 1
    lists.zero_()
    for i, part in enumerate(logits.split(SLICE, 1)):
        best, column = part.float().sort(dim=1, descending=True, stable=True)
        best, column = best[:, :k], column[:, :k]
        lists[:, i, : best.shape[1]] = _candidates(best, column + first_id + i * SLICE)
        sums = (part.double() - _base(best[:, :1]).double()).exp().sum(1).float()
        lists[:, i, k] = sums.view(torch.int32).long() & _LOW


def _merge_cpu(lists: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    check(_merge_problems(lists, ids, logprobs))
    rows, k = ids.shape
    lists = lists.transpose(0, 1).flatten(1, 2)
    keys, names = _decoded(lists[:, :, :k].reshape(rows, -1))
    names, order = names.sort(dim=1)
    keys, order = keys.gather(1, order).sort(dim=1, descending=True, stable=True)
    keys, names = keys[:, :k], names.gather(1, order)[:, :k]
    values, base = _logits(keys), _base(_logits(keys[:, :1])).double()
    sums = lists[:, :, k].int().view(torch.float32).double()
    largest = _logits(_decoded(lists[:, :, 0])[0]).double()
    total = torch.where(lists[:, :, 0] != 0, sums * (largest - base).exp(), 0.0).sum(1, keepdim=True)
    lse = (base + total.log()).float()
    ids.copy_(torch.where(keys != 0, names, -1))
    logprobs.copy_(torch.where(keys != 0, values - lse, -torch.inf))


def _base(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest.isinf(), 0.0, largest)


def _candidates(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 words of fp32 logits and int64 ids; the sign bit counts as the 64th bit that the kernels see."""
    bits = (logits + 0.0).view(torch.int32).long() & _LOW  # -0 + 0 is 0
    keys = torch.where(bits >> 31 != 0, ~bits & _LOW, bits | 1 << 31)
    keys = torch.where(logits.isnan(), _LOW, keys)
    return keys << 32 | ~ids & _LOW


def _decoded(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, 0 .. 2**32 - 1, and ids of the words."""
    return candidates >> 32 & _LOW, ~candidates & _LOW


def _logits(keys: torch.Tensor) -> torch.Tensor:
    bits = torch.where(keys >> 31 != 0, keys & 0x7FFFFFFF, ~keys & _LOW)
    return bits.int().view(torch.float32)


def _nothing(*args: object) -> None:
    """Fake of both ops: they return nothing and write into buffers of known shape."""


for _name, _cuda, _cpu in (("topk_lists", _lists_cuda, _lists_cpu), ("topk_merge", _merge_cuda, _merge_cpu)):
    _lib.impl(_name, _cuda, "CUDA")
    _lib.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"treeverify::{_name}", _nothing, lib=_lib)

topk_lists = torch.ops.treeverify.topk_lists
topk_merge = torch.ops.treeverify.topk_merge
