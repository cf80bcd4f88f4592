# SPDX-License-Identifier: Apache-2.0
"""Verify steps of a patched SGLang, recorded on the CPU: what the overlay's ops were given, and what is right.

A file of them can be taken to a GPU that has no SGLang: `replayed` gives the kernels exactly those tensors.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Case(NamedTuple):
    """What is recorded."""

    name: str
    backend: str
    kind: str
    """As mla_rig.Step.spec_info has it."""
    prefixes: list[int]
    n: int
    bucket: int = 0
    """Requests of a captured graph that it replays in; 0: a pass outside graphs."""


CASES = [
    Case("flashinfer-eager-full", "flashinfer", "ngram", [5, 0, 70], 8),
    Case("flashinfer-eager-wide", "flashinfer", "ngram_qlen", [17], 65),
    Case("flashinfer-replay-padded", "flashinfer", "eagle", [9, 44], 8, 4),
    Case("triton-eager-full", "triton", "eagle", [33, 6], 5),
    Case("triton-replay-padded", "triton", "ngram_qlen", [9, 44], 8, 3),
]


WORKSPACE = 16
"""Where mla_verify has its scratch: as many floats, which nobody needs to know."""


class _Recording(TorchDispatchMode):
    """Keeps what each op of ours is given, with the strides and what else lies in the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "treeverify":
            self.heard.append((func._schema.name.partition("::")[2], [_kept(a) for a in args]))
        return func(*args, **kwargs or {})


def _kept(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def record(file: str) -> list[str]:
    """Writes the steps of CASES to `file`; runs where SGLang is imported. Returns their names."""
    steps = [_recorded(case) for case in CASES]
    torch.save(steps, file)
    return [step["name"] for step in steps]


def _recorded(case: Case) -> dict[str, Any]:
    from mla_rig import Rig

    algorithm = "EAGLE" if case.kind == "eagle" else "NGRAM"
    with patch.dict(os.environ, TREEVERIFY_TRITON="1"):
        rig = Rig(
            attention_backend=case.backend, speculative_algorithm=algorithm, speculative_num_draft_tokens=case.n,
            context=96,
        )  # fmt: skip
        backend = rig.backend()
    step = rig.step(case.prefixes, case.n)
    batch, given, bs = step.forward_batch(case.kind), step, case.bucket or step.bs
    if case.bucket:
        backend.init_cuda_graph_state(bs, bs * case.n)
        runner = rig.graph_runner(backend, bs, case.n)
        rig.release.runner_captures(runner)
        runner.buffers.req_pool_indices.fill_(7)  # what an earlier, fuller replay may have left
        given = step.padded((bs - step.bs) * case.n)
    with _Recording() as recording:
        if case.bucket:
            rig.release.runner_replays(runner, batch)
            batch.out_cache_loc = runner.buffers.out_cache_loc
        else:
            backend.init_forward_metadata(batch)
        if case.backend == "triton":
            q, k = torch.cat([given.q_nope, given.q_rope], -1), torch.cat([given.k, given.k_rope], -1)
            backend.forward_extend(q, k, given.k, rig.layer, batch)
        else:
            given.attend(backend, batch)
    (prep, prep_args), (verify, verify_args) = recording.heard
    assert (prep, verify) == ("mla_prep", "mla_verify"), recording.heard
    at = WORKSPACE
    table, floats, verify_args[at] = rig.requests.req_to_token, verify_args[at].numel(), torch.empty(0)
    rows = zip(step.req_pool_indices.tolist(), case.prefixes, strict=True)
    lengths = [prefix + case.n for prefix in case.prefixes] + [0] * (bs - step.bs)
    return {
        "name": case.name,
        "n": case.n,
        "real": step.bs,
        "prep": prep_args,
        "verify": verify_args,
        "workspace": floats,
        "kv_indptr": [0, *itertools.accumulate(lengths)],
        "kv_indices": torch.cat([table[row, : prefix + case.n] for row, prefix in rows]).tolist(),
        "visible": step.visible,
        "attention": step.expected().unflatten(1, (rig.heads, -1)),
    }


def packed(visible: torch.Tensor) -> torch.Tensor:
    """bool [bs, n, n] as 64-bit words [bs, n, ceil(n / 64)]: bit j of row i where node i sees node j."""
    words = -(-visible.shape[-1] // 64)
    bits = torch.nn.functional.pad(visible, (0, 64 * words - visible.shape[-1])).unflatten(-1, (words, 64))
    return sum((bits[..., j].long() << j for j in range(64)), start=torch.zeros(bits.shape[:-1], dtype=torch.int64))
