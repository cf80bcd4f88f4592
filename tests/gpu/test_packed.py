# SPDX-License-Identifier: Apache-2.0
"""attention/packed.py on the GPU: what servers call every step, against the ops and without a wait."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from treeverify.attention import abi, buffers, cases, ops, packed, paths
from waits import no_synchronisation

pytestmark = pytest.mark.gpu

BS, N, CONTEXT = 5, 12, 600


def bucket(plan: bool, device: str) -> tuple[torch.Tensor, buffers.VerifyMetadata]:
    """req_to_token and poisoned buffers; the geometry is the GPU's for both devices."""
    here = torch.device("cuda", torch.cuda.current_device())
    geometry = buffers.Geometry(here, heads=8, row_width=CONTEXT, target=paths.target(here), plan=plan)
    geometry = dataclasses.replace(geometry, device=here if device == "cuda" else torch.device("cpu"))
    to = buffers.GraphBuffers(geometry, BS, N).metadata(BS)
    for t in (to.kv_indptr, to.kv_indices, to.mask, to.split_indptr):
        if t is not None:
            t.fill_(-7)
    table = torch.randperm(8 * CONTEXT, generator=torch.Generator().manual_seed(1)).int().view(8, CONTEXT)
    return table.to(geometry.device), to


@pytest.mark.parametrize("plan", [False, True])
def test_steps_of_a_bucket(plan: bool) -> None:
    """Every mask form, lengths of both widths, fewer requests than captured; nothing waits."""
    mine, theirs = bucket(plan, "cuda"), bucket(plan, "cpu")
    prep, expected = packed.prep(*mine), packed.prep(*theirs)
    assert type(prep) is packed.PackedPrep and type(expected) is packed.Prep
    assert (mine[1].split_indptr is not None) == plan
    generator = torch.Generator().manual_seed(2)
    for kind in (abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN):
        for raw_bs, dtype in ((BS, torch.int64), (2, torch.int32), (0, torch.int32)):
            lens = torch.randint(0, CONTEXT - N, (raw_bs,), generator=generator).to(dtype)
            rows = torch.randperm(8, generator=generator)[:raw_bs]
            trees = cases.random_trees(raw_bs, N, generator, "cpu") if raw_bs else None
            mask = None if trees is None else cases.prep_mask(kind, trees, lens.tolist())
            asked = kind if mask is not None else abi.MASK_NONE
            expected(rows, lens, mask, asked, raw_bs)
            step = rows.cuda(), lens.cuda(), None if mask is None else mask.cuda()
            with no_synchronisation():
                prep(*step, asked, raw_bs)
            for name in ("kv_indptr", "kv_indices", "mask", "split_indptr"):
                found, want = getattr(mine[1], name), getattr(theirs[1], name)
                if name == "kv_indices":
                    used = int(theirs[1].kv_indptr[-1])
                    found, want = found[:used], want[:used]
                if found is not None:
                    assert torch.equal(found.cpu(), want), (name, kind, raw_bs)


def test_a_wrong_step_is_named_and_not_launched() -> None:
    table, to = bucket(False, "cuda")
    prep = packed.prep(table, to)
    rows, lens = torch.zeros(BS, dtype=torch.int64, device="cuda"), torch.zeros(BS, dtype=torch.int32, device="cuda")
    for step, said in [
        ((rows.cpu(), lens, None, 0, BS), "req_pool_indices is on cpu"),
        ((rows, lens.float(), None, 0, BS), "seq_lens is torch.float32"),
        ((rows, lens[:1], None, 0, BS), "seq_lens has 1 entries"),
        ((rows, lens, rows[:1], 1, BS), "custom_mask has 1 entries"),
    ]:
        with pytest.raises(ValueError, match=said):
            prep(*step)
    torch.cuda.synchronize()
    assert (to.kv_indptr == -7).all()


def test_layers_of_an_eager_pass(make_case) -> None:
    """Bits of the op, for layers of different pools and scales, and for tensors that move from step to step."""
    call = packed.PackedVerify()
    case = make_case([300, 20, 5], 9, 8)
    pools = [case.pool, case.pool.flip(-1).contiguous()]
    for _ in range(3):
        q, q_pe = torch.randn_like(case.q_nope), torch.randn_like(case.q_pe)
        for pool, scale in zip(pools, (0.1, 0.2), strict=True):
            outs = []
            for verify in (ops.mla_verify, call):
                out = torch.full_like(case.out, float("nan"))
                verify(
                    q, q_pe, pool, case.kv_indptr, case.kv_indices, case.qo_indptr, None, case.mask, None,
                    case.mask_kind, case.bs, case.n, case.nsplit, scale, 0.0, out, case.workspace, None, 0, case.path,
                    case.taper,
                )  # fmt: skip
                outs.append(out)
            assert torch.equal(*outs) and outs[0].isfinite().all()
    assert len(call._known) == 2
