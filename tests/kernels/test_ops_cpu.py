# SPDX-License-Identifier: Apache-2.0
"""The ops on the CPU: prep against a plain construction, verify against textbook attention, errors, fakes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from treeverify.attention import abi, cases, ops, reference


def textbook(case: cases.Case, b: int) -> torch.Tensor:
    """scaled_dot_product_attention of one request in float64, [n, H, 512]."""
    q0 = b * case.n
    q = torch.cat([case.q_nope, case.q_pe], -1)[q0 : q0 + case.n].double().transpose(0, 1)
    slots = case.kv_indices[case.kv_indptr[b] : case.kv_indptr[b + 1]].long()
    if case.out_cache_loc is not None:
        slots = torch.cat([slots, case.out_cache_loc[q0 : q0 + case.n]])
    key = (case.pool.view(-1, 576)[slots].double() * case.k_scale).expand(q.shape[0], -1, -1)
    mask = torch.cat([torch.ones(case.n, len(slots) - case.n, dtype=torch.bool), case.visible[b]], 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, key, key[..., :512], attn_mask=mask, scale=case.sm_scale)
    return out.transpose(0, 1)


@pytest.mark.parametrize("two_source", [False, True])
@pytest.mark.parametrize("kind", [abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN])
@pytest.mark.parametrize("n", [1, 7, 65])
def test_verify_is_textbook_attention(n, kind, two_source):
    case = cases.make_case([0, 5, 33], n, 3, device="cpu", mask_kind=kind, two_source=two_source, extra_tokens=2)
    out = case.run()
    for b in range(case.bs):
        assert (
            reference.worst_row_error(out[b * n : (b + 1) * n], textbook(case, b)) < 4e-3
        )  # bf16 rounding of the output
    assert torch.equal(out[case.bs * n :], torch.zeros_like(out[case.bs * n :]))
    assert reference.worst_row_error(case.expected(), out.double()) < 4e-3


@pytest.mark.parametrize("logit_cap", [0.0, 2.0])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_pool_in_units_of_its_scale(kv_dtype, logit_cap):
    """A power of two, which may as well stand in the pool itself: in front of the soft cap."""
    shape = [0, 5, 33], 7, 3
    scaled = cases.make_case(*shape, device="cpu", kv_dtype=kv_dtype, k_scale=0.25, logit_cap=logit_cap)
    plain = cases.make_case(*shape, device="cpu", kv_dtype=torch.bfloat16, logit_cap=logit_cap)
    plain.pool = scaled.pool.bfloat16() * 0.25
    assert torch.equal(scaled.run(), plain.run())
    if logit_cap == 0:
        for b in range(scaled.bs):
            assert reference.worst_row_error(scaled.out[b * 7 : (b + 1) * 7], textbook(scaled, b)) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float16, torch.float8_e4m3fn), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_pools_that_the_kernels_do_not_read_are_named(dtype, kv_dtype):
    case = cases.make_case([4], 3, 2, device="cpu", dtype=dtype, kv_dtype=kv_dtype)
    with pytest.raises(ValueError, match=f"kv_buffer is {kv_dtype}, expected {dtype}, or an fp8 where q is bfloat16"):
        ops._verify_cuda(*verify_args(case))


def verify_args(case: cases.Case) -> ops.VerifyArgs:
    """What the op would get."""
    heard: list[ops.VerifyArgs] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "mla_verify", lambda *args: heard.append(ops.VerifyArgs(*args)))
        case.run()
    return heard[0]


def test_a_mask_that_leaves_its_tensor_is_causal():
    whole = cases.make_case([4, 6], 5, 2, device="cpu", mask_kind=abi.MASK_FULL)
    assert whole.mask is not None
    short = whole.mask[:-1]
    before = whole.run().clone()
    whole.mask = short
    after = whole.run()
    assert torch.equal(before[:5], after[:5])
    whole.visible[1] = reference.causal(5)
    assert reference.worst_row_error(after, whole.expected()) < 4e-3


@pytest.mark.parametrize("kind", [abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN])
@pytest.mark.parametrize("seq_dtype", [torch.int32, torch.int64])
def test_prep(kind, seq_dtype):
    n, real, bs = 6, 3, 5
    lens, table = [9, 0, 4], torch.randperm(7 * 40).int().view(7, 40)
    rows = torch.tensor([2, 6, 0, 999, -1])  # padding rows hold stale numbers and must not be followed
    trees = cases.random_trees(real, n, torch.Generator().manual_seed(1), "cpu")
    mask = cases.prep_mask(kind, trees, lens)
    indptr, indices = torch.full((bs + 2,), -7, dtype=torch.int32), torch.full((100,), -7, dtype=torch.int32)
    packed = torch.full((bs, n, 1), -7)
    ops.mla_prep(table, rows, torch.tensor(lens, dtype=seq_dtype), mask, kind, real, bs, n, indptr, indices, packed)
    assert indptr.tolist() == [0, 15, 21, 31, 31, 31, -7]
    slots = torch.cat([table[rows[b], : lens[b] + n] for b in range(real)])
    assert torch.equal(indices[:31], slots) and (indices[31:] == -7).all()
    shown = reference.unpack_mask(packed, n)
    assert torch.equal(shown[:real], trees if kind != abi.MASK_NONE else reference.causal(n).expand(real, n, n))
    assert torch.equal(shown[real:], reference.causal(n).expand(bs - real, n, n))


def test_prep_without_drafts_counts_what_there_is():
    table = torch.randperm(3 * 10).int().view(3, 10)
    indptr, indices = torch.full((4,), -7, dtype=torch.int32), torch.full((20,), -7, dtype=torch.int32)
    rows, lens, nothing = torch.tensor([2, 0, 999]), torch.tensor([4, 10]), torch.empty(0, dtype=torch.int64)
    ops.mla_prep(table, rows, lens, None, abi.MASK_NONE, 2, 3, 0, indptr, indices, nothing)
    assert indptr.tolist() == [0, 4, 14, 14]
    assert torch.equal(indices[:14], torch.cat([table[2, :4], table[0]])) and (indices[14:] == -7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_indptr": torch.zeros(3)}, "kv_indptr is torch.float32, expected torch.int32"),
        ({"nsplit": 0}, "nsplit 0 is not within"),
        ({"nsplit": 3, "taper": 3}, "taper 3 is not within 0 .. 2"),
        ({"n": 300}, "draft width 300 is not within"),
        ({"workspace": torch.zeros(1)}, "workspace has 1 entries, expected at least"),
        ({"mask": None}, "mask_kind 1 needs a mask"),
        ({"q_pe": torch.zeros(1)}, "q_pe is"),
    ],
)
def test_bad_arguments_are_named(change, message):
    case = cases.make_case([4, 4], 3, 2, device="cpu", nsplit=2)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_more_partial_rows_than_the_merge_counts_are_named():
    q = torch.empty(1, 128, 512, device="meta")
    asked = dict.fromkeys(ops.VerifyArgs._fields, 0) | {"bs": 9, "nsplit": 256, "q_nope": q, "max_q": 64}
    asked["split_indptr"] = None
    assert not list(ops._split_problems(ops.VerifyArgs(**asked)))
    [problem] = ops._split_problems(ops.VerifyArgs(**asked | {"max_q": 128}))
    assert "37748736 partial rows, over 33554432; lower nsplit" in problem


def test_too_many_heads_are_named():
    with pytest.raises(ValueError, match="129 heads are not within 1 .. 128"):
        cases.make_case([4], 1, 129, device="cpu").run()


def test_prep_refuses_foreign_dtypes():
    args = [torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    out = [torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)]
    ops.mla_prep(*args, None, 0, 1, 1, 4, *out)
    with pytest.raises(ValueError, match=r"req_pool_indices is torch\.int32, expected torch.int64"):
        ops.mla_prep(args[0], args[1].int(), args[2], None, 0, 1, 1, 4, *out)
    with pytest.raises(ValueError, match="mask_kind 2 needs a custom_mask"):
        ops.mla_prep(*args, None, 2, 1, 1, 4, *out)
    with pytest.raises(ValueError, match=r"custom_mask is torch\.bool, expected 64-bit words for kind 1"):
        ops.mla_prep(*args, torch.ones(4, dtype=torch.bool), 1, 1, 1, 4, *out)
    with pytest.raises(ValueError, match=r"custom_mask is torch\.int64, expected bool or uint8 for kind 3"):
        ops.mla_prep(*args, torch.ones(16, dtype=torch.int64), 3, 1, 1, 4, *out)
    with pytest.raises(ValueError, match="custom_mask has 3 entries, expected at least 4"):
        ops.mla_prep(*args, torch.ones(3, dtype=torch.int64), 1, 1, 1, 4, *out)


def test_fakes_trace_without_running():
    with FakeTensorMode():
        q, pe, kv = torch.empty(4, 2, 512), torch.empty(4, 2, 64), torch.empty(8, 1, 576)
        ip, out = torch.empty(2, dtype=torch.int32), torch.empty(4, 2, 512)
        assert ops.mla_verify(q, pe, kv, ip, ip, ip, None, None, None, 0, 1, 4, 1, 0.1, 0.0, out, out) is None


def test_flipping_one_bit_changes_only_its_row():
    case = cases.make_case([3, 8], 9, 2, device="cpu")
    before = case.run().clone()
    assert case.mask is not None
    case.mask[1, 6, 0] ^= 1 << 2
    changed = (case.run() != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [9 + 6]


def test_error_metric_rejects_what_is_not_finite_or_not_zero():
    ref = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert reference.worst_row_error(ref, ref) == 0
    assert reference.worst_row_error(ref + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), ref) == pytest.approx(0.1)
    assert reference.worst_row_error(ref + torch.tensor([[0.0, 0.0], [0.0, 0.5]]), ref) == 0.5
    assert reference.worst_row_error(torch.full_like(ref, float("nan")), ref) == float("inf")
