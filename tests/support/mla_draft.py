# SPDX-License-Identifier: Apache-2.0
"""An MLA drafter's side of EAGLE on the flashinfer backend: DraftBackendFactory, and one draft step against float64."""

from __future__ import annotations

from typing import Any

import torch
from mla_rig import LATENT, ROPE, Rig, worst_row

STEPS, TOPK = 3, 4


def draft_factory(topk: int, dtype: torch.dtype, device: str) -> tuple[Rig, Any]:
    """A drafter's rig and the factory that EAGLE's worker asks for its attention backends."""
    options: dict[str, Any] = {"speculative_num_steps": STEPS, "speculative_eagle_topk": topk}
    rig = Rig(dtype, device=device, is_draft_worker=True, **options)
    return rig, rig.release.draft_factory(rig, topk, STEPS)


class DraftInput:
    """What the multi-step backend writes on its draft input."""

    kv_indptr: Any = None
    kv_indices: Any = None
    window_kv_indptr: Any = None
    window_kv_indices: Any = None

    def is_draft_input(self) -> bool:
        return True


def draft_step(split: bool, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The second draft step of two requests, TOPK branches each, through Triton's kernel.

    Returns:
        Worst row's relative error: `own`, against the branch's own tokens; `crossed`, against its neighbour's.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig, factory = draft_factory(TOPK, dtype, device)
    backend = factory.create_decode_backend()
    prefixes, rows, index = [6, 19], torch.tensor([3, 1], device=device), 1
    bs, branches = len(prefixes), len(prefixes) * TOPK
    slots = (torch.randperm(rig.pool.size, generator=rig.generator) + 1).int().to(device)
    table, at = rig.requests.req_to_token, 0
    for row, prefix in zip(rows.tolist(), prefixes, strict=True):
        width = prefix + TOPK * STEPS  # prefix, then STEPS slots a branch
        table[row, :width] = slots[at : at + width]
        at += width
    own = [(b, k) for b in range(bs) for k in range(TOPK)]

    def slot(b: int, branch: int, step: int) -> int:
        return int(table[rows[b], prefixes[b] + branch * STEPS + step])

    batch = rig.release.forward_batch(
        rig, forward_mode=ForwardMode.DECODE, batch_size=bs,
        input_ids=torch.zeros(branches, dtype=torch.int64, device=device), req_pool_indices=rows,
        seq_lens=torch.tensor(prefixes, device=device), seq_lens_sum=sum(prefixes),
        out_cache_loc=torch.tensor([slot(b, k, index) for b, k in own], device=device),
        positions=torch.tensor(prefixes, device=device).repeat_interleave(TOPK),
        spec_info=DraftInput(),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    q, q_rope = rig.randn(rig.heads, branches, LATENT).transpose(0, 1), rig.randn(branches, rig.heads, ROPE)
    k, k_rope = rig.randn(branches, 1, LATENT), rig.randn(branches, 1, ROPE)
    joined, step = torch.cat([q, q_rope], -1), backend.attn_backends[index]
    if split:
        out = step.forward_decode(q, k, k, rig.layer, batch, q_rope=q_rope, k_rope=k_rope)
    else:
        out = step.forward_decode(joined, torch.cat([k, k_rope], -1), k, rig.layer, batch)
    pool = rig.pool.kv_buffer[0][:, 0].double()

    def attended(row: int, branch: int) -> torch.Tensor:
        b = own[row][0]
        keys = pool[table[rows[b], : prefixes[b]].tolist() + [slot(b, branch, s) for s in range(index + 1)]]
        weight = torch.softmax(joined[row].double() @ keys.T * rig.layer.scaling, -1)
        return (weight @ keys[:, :LATENT]).flatten()

    mine = torch.stack([attended(row, branch) for row, (_, branch) in enumerate(own)])
    other = torch.stack([attended(row, (branch + 1) % TOPK) for row, (_, branch) in enumerate(own)])
    return {"own": worst_row(out, mine), "crossed": worst_row(out, other)}
