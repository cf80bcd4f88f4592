# SPDX-License-Identifier: Apache-2.0
"""The metadata call of a replay, through SGLang's own backends and graph runner: ours before and after, and stock's.

"op" has mla_prep called as an op that checks and packs all its arguments, as it was once; "packed" is what servers run;
"stock" is the release: FlashInfer's plan() with its blocking copies, the mask dropped, or Triton's ten operators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .host import host_us

CASES = [
    # prefixes, captured requests, draft tokens
    ([1000], 1, 16),
    ([1000] * 7, 8, 16),
    ([1000] * 7, 8, 64),
]
CONTEXT = 8192
BACKENDS = ("flashinfer", "triton")

Row = dict[str, Any]


def measure(attention: Any, device: torch.device, calls: int) -> Iterator[Row]:
    """Rows of every backend, way and case. On the CPU stock's rows are left out: no kernel of FlashInfer runs there."""
    stock = ("stock",) if device.type == "cuda" else ()
    for backend in BACKENDS:
        for prefixes, bs, n in CASES:
            for way in ("op", "packed", *stock):
                row = {"call": "metadata", "backend": backend, "way": way, "bs": bs, "real": len(prefixes), "n": n}
                yield {**row, **_replay(attention, device, backend, way, prefixes, bs, n, calls)}


def _replay(
    attention: Any, device: torch.device, name: str, way: str, prefixes: list[int], bs: int, n: int, calls: int
) -> dict[str, float]:
    from mla_rig import Rig
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.treeverify.attention import graph, verifier

    rig = Rig(
        device=device.type, heads=8, context=CONTEXT, attention_backend=name, speculative_num_draft_tokens=n,
        speculative_eagle_topk=4,
    )  # fmt: skip
    with _environment({"TREEVERIFY_DISABLE": "1"} if way == "stock" else {}):
        backend = rig.backend()
    if (backend.tree_verify is None) != (way == "stock"):
        raise RuntimeError(f"{name}: {way} was asked for, and the backend serves with the other")
    usual, verifier.prep = verifier.prep, attention.packed.Prep if way == "op" else attention.packed.PackedPrep
    try:
        backend.init_cuda_graph_state(bs, bs * n)
        runner = rig.graph_runner(backend, bs, n)
        buffers, mode = runner.buffers, ForwardMode.TARGET_VERIFY
        rows, lens, cpu = buffers.req_pool_indices[:bs], buffers.seq_lens[:bs], buffers.seq_lens_cpu[:bs]
        backend.init_forward_metadata_capture_cuda_graph(
            bs, bs * n, rows, lens, None, mode, runner.get_spec_info(bs * n)
        )
    finally:
        verifier.prep = usual
    batch = rig.step(prefixes, n).forward_batch("eagle")
    runner.replay_prepare(batch)
    spec_info, real = batch.spec_info, len(prefixes)
    total = sum(prefixes) + bs - real

    def metadata() -> None:
        graph.hand_over_raw_bs(backend, real)
        backend.init_forward_metadata_replay_cuda_graph(
            bs, rows, lens, total, None, mode, spec_info, seq_lens_cpu=cpu
        )

    return host_us(metadata, calls, torch.cuda.synchronize if device.type == "cuda" else metadata)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
