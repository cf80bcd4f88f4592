# SPDX-License-Identifier: Apache-2.0
"""torch.ops.treeverify.mla_prep, mla_plan and mla_verify: SGLang's tensors in, kernels of libtreeverify behind.

On CUDA they only launch: no copy, no cast, no allocation, no synchronisation. On the CPU the float64 reference answers,
so that the patched backends run, and are tested, on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import abi, paths, reference
from .checks import INDEX_BYTES, check, not_dense, not_index, not_typed, too_short
from .launch import launch
from .plan import (
    KEY_DIM,
    LATENT,
    MAX_GRID_SPLITS,
    MAX_HEADS,
    MAX_PARTIALS,
    MAX_PLANNED_SPLITS,
    MAX_Q,
    MAX_SPLITS,
    MAX_TAPER,
    ROPE,
    mask_words,
    plan_size,
    planned,
    workspace_floats,
)

_DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16}


class PrepArgs(NamedTuple):
    """Arguments of mla_prep, in order."""

    req_to_token: torch.Tensor  # int32 [rows, context]
    req_pool_indices: torch.Tensor  # int64 [>= raw_bs]
    seq_lens: torch.Tensor  # int32 or int64 [>= raw_bs], prefix lengths without drafts; cut at the row's width
    custom_mask: torch.Tensor | None  # bool or uint8, flat; 64-bit words [>= raw_bs, n, ceil(n / 64)] where PACKED
    mask_kind: int  # abi.MASK_*; MASK_NONE is causal
    raw_bs: int  # real requests; raw_bs .. bs are padding and get length 0
    bs: int
    n: int  # draft tokens a request; 0 where seq_lens counts all there is: no mask then
    kv_indptr: torch.Tensor  # out: int32 [>= bs + 1]
    kv_indices: torch.Tensor  # out: int32 or int64, prefix and draft slots
    packed_mask: torch.Tensor  # out: 64-bit words [bs, n, ceil(n / 64)]


class PlanArgs(NamedTuple):
    """Arguments of mla_plan, in order."""

    kv_indptr: torch.Tensor  # int32 [>= bs + 1], prefix and draft of each request
    bs: int
    splits: int  # to hand out in all, bs .. plan.MAX_PLANNED_SPLITS
    split_indptr: torch.Tensor  # out: int32 [>= plan.plan_size(bs)], laid out as plan.planned says


class VerifyArgs(NamedTuple):
    """Arguments of mla_verify, in order."""

    q_nope: torch.Tensor  # bf16 or fp16 [T, H, 512], any strides but the last
    q_pe: torch.Tensor  # [T, H, 64]
    kv_buffer: torch.Tensor  # [slots, 1, 576] of q's dtype, or float8_e4m3fn or float8_e5m2 where q is bf16
    kv_indptr: torch.Tensor  # int32 [>= bs + 1]
    kv_indices: torch.Tensor  # int32 or int64
    qo_indptr: torch.Tensor  # int32 or int64 [>= bs + 1]
    out_cache_loc: torch.Tensor | None  # int64 [T]: draft slots, where kv_indices holds the prefix only
    mask: torch.Tensor | None  # packed words, or bool / uint8
    mask_indptr: torch.Tensor | None  # int64 [>= bs]
    mask_kind: int  # abi.MASK_*
    bs: int
    max_q: int  # largest draft width of the batch
    nsplit: int  # splits of each request, where there is no split_indptr
    sm_scale: float
    logit_cap: float  # 0: none
    out: torch.Tensor  # out: [T, H, 512], every row is written
    workspace: torch.Tensor  # scratch: fp32, plan.workspace_floats(bs, max_q, H, all_splits)
    split_indptr: torch.Tensor | None = None  # int32 [>= plan.plan_size(bs)], from mla_plan
    splits: int = 0  # what mla_plan was given; only with split_indptr
    path: int = abi.PATH_AUTO  # abi.PATH_*
    taper: int = 0  # of each request's splits the last, each half as long as the one before; only without a plan
    k_scale: float = 1.0  # keys and values are k_scale times what kv_buffer holds

    @property
    def all_splits(self) -> int:
        """Splits of all requests together, or as many as the plan may use."""
        return self.bs * self.nsplit if self.split_indptr is None else self.splits


_lib = torch.library.Library("treeverify", "DEF")
_lib.define(
    "mla_prep(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor? custom_mask, int mask_kind, "
    "int raw_bs, int bs, int n, Tensor(a!) kv_indptr, Tensor(b!) kv_indices, Tensor(c!) packed_mask) -> ()"
)
_lib.define(
    "mla_verify(Tensor q_nope, Tensor q_pe, Tensor kv_buffer, Tensor kv_indptr, Tensor kv_indices, Tensor qo_indptr, "
    "Tensor? out_cache_loc, Tensor? mask, Tensor? mask_indptr, int mask_kind, int bs, int max_q, int nsplit, "
    "float sm_scale, float logit_cap, Tensor(a!) out, Tensor(b!) workspace, Tensor? split_indptr=None, int splits=0, "
    "int path=0, int taper=0, float k_scale=1.0) -> ()"
)
_lib.define("mla_plan(Tensor kv_indptr, int bs, int splits, Tensor(a!) split_indptr) -> ()")


def prep_problems(a: PrepArgs) -> Iterator[str]:
    """What is wrong with the arguments of mla_prep."""
    if not 0 <= a.raw_bs <= a.bs:
        yield f"raw_bs {a.raw_bs} is not within the batch size {a.bs}"
    if not 0 <= a.n <= MAX_Q:
        yield f"draft width {a.n} is not within 0 .. {MAX_Q}"
    yield from not_typed(torch.int32, req_to_token=a.req_to_token, kv_indptr=a.kv_indptr)
    yield from not_typed(torch.int64, req_pool_indices=a.req_pool_indices)
    yield from not_index(seq_lens=a.seq_lens, kv_indices=a.kv_indices)
    if a.req_to_token.stride(-1) != 1:
        yield "req_to_token must be contiguous along its rows"
    yield from not_dense(
        kv_indptr=a.kv_indptr,
        kv_indices=a.kv_indices,
        packed_mask=a.packed_mask,
        req_pool_indices=a.req_pool_indices,
        seq_lens=a.seq_lens,
        custom_mask=a.custom_mask,
    )
    yield from too_short(a.raw_bs, req_pool_indices=a.req_pool_indices, seq_lens=a.seq_lens)
    yield from too_short(a.bs + 1, kv_indptr=a.kv_indptr)
    yield from too_short(a.bs * a.n * mask_words(a.n), packed_mask=a.packed_mask)
    if a.packed_mask.element_size() != 8:
        yield f"packed_mask is {a.packed_mask.dtype}, expected 64-bit words"
    if not abi.MASK_NONE <= a.mask_kind <= abi.MASK_QLEN:
        yield f"mask_kind {a.mask_kind} is not within 0 .. 3"
    if a.mask_kind != abi.MASK_NONE and a.custom_mask is None:
        yield f"mask_kind {a.mask_kind} needs a custom_mask"
    packed = a.mask_kind == abi.MASK_PACKED
    if a.custom_mask is not None and a.custom_mask.element_size() != (8 if packed else 1):
        yield f"custom_mask is {a.custom_mask.dtype}, expected {_mask_dtype(packed)} for kind {a.mask_kind}"
    if packed:
        yield from too_short(a.raw_bs * a.n * mask_words(a.n), custom_mask=a.custom_mask)


def prep_params(a: PrepArgs) -> abi.PrepParams:
    """The arguments of tv_mla_prep.

    Raises:
        ValueError: they are wrong; the message says which.
    """
    check(prep_problems(a))
    return abi.PrepParams(
        req_to_token=a.req_to_token.data_ptr(),
        req_pool_indices=a.req_pool_indices.data_ptr(),
        seq_lens=a.seq_lens.data_ptr(),
        custom_mask=_pointer(a.custom_mask),
        kv_indptr=a.kv_indptr.data_ptr(),
        kv_indices=a.kv_indices.data_ptr(),
        packed_mask=a.packed_mask.data_ptr(),
        row_stride=a.req_to_token.stride(0),
        kv_capacity=a.kv_indices.numel(),
        mask_numel=a.custom_mask.numel() if a.custom_mask is not None else 0,
        seq_len_bytes=INDEX_BYTES[a.seq_lens.dtype],
        kv_index_bytes=INDEX_BYTES[a.kv_indices.dtype],
        mask_kind=a.mask_kind,
        raw_bs=a.raw_bs,
        bs=a.bs,
        n=a.n,
        rows=a.req_to_token.shape[0],
    )


def _prep_cuda(*args: Any) -> None:
    a = PrepArgs(*args)
    if a.bs:
        launch("mla_prep", prep_params(a), a.kv_indptr.device)


def _prep_cpu(*args: Any) -> None:
    a = PrepArgs(*args)
    check(prep_problems(a))
    words, at, mask_at = mask_words(a.n), 0, 0
    packed = a.packed_mask.view(torch.int64).view(-1)[: a.bs * a.n * words].view(a.bs, a.n, words)
    a.kv_indptr[0] = 0
    for b in range(a.bs):
        real = b < a.raw_bs
        length = min(int(a.seq_lens[b]) + a.n, a.req_to_token.shape[1]) if real else 0
        if real:
            a.kv_indices[at : at + length] = a.req_to_token[a.req_pool_indices[b], :length]
        at += length
        a.kv_indptr[b + 1] = at
        if a.n == 0:
            continue
        start, kind = torch.tensor([mask_at]), a.mask_kind if real else abi.MASK_NONE
        if kind == abi.MASK_PACKED and a.custom_mask is not None:
            packed[b] = a.custom_mask.view(torch.int64).view(-1)[b * a.n * words :][: a.n * words].view(a.n, words)
        else:
            visible = reference.request_mask(0, a.n, length - a.n, kind, a.custom_mask, start, a.n)
            packed[b] = reference.pack_mask(visible)
        mask_at += a.n * (length if kind == abi.MASK_FULL else a.n)


def _plan_problems(a: PlanArgs) -> Iterator[str]:
    if not 1 <= a.bs <= a.splits <= MAX_PLANNED_SPLITS:
        yield f"{a.splits} splits for {a.bs} requests: a plan has at least one each and {MAX_PLANNED_SPLITS} at most"
    yield from not_typed(torch.int32, kv_indptr=a.kv_indptr, split_indptr=a.split_indptr)
    yield from not_dense(kv_indptr=a.kv_indptr, split_indptr=a.split_indptr)
    yield from too_short(a.bs + 1, kv_indptr=a.kv_indptr)
    yield from too_short(plan_size(a.bs), split_indptr=a.split_indptr)


def plan_params(a: PlanArgs) -> abi.PlanParams:
    """The arguments of tv_mla_plan.

    Raises:
        ValueError: they are wrong; the message says which.
    """
    check(_plan_problems(a))
    return abi.PlanParams(
        kv_indptr=a.kv_indptr.data_ptr(), split_indptr=a.split_indptr.data_ptr(), bs=a.bs, splits=a.splits
    )


def _plan_cuda(*args: Any) -> None:
    a = PlanArgs(*args)
    launch("mla_plan", plan_params(a), a.kv_indptr.device)


def _plan_cpu(*args: Any) -> None:
    a = PlanArgs(*args)
    check(_plan_problems(a))
    lengths = a.kv_indptr[: a.bs + 1].diff().tolist()
    a.split_indptr[: plan_size(a.bs)] = torch.tensor(planned(lengths, a.splits), dtype=torch.int32)


def _verify_problems(a: VerifyArgs) -> Iterator[str]:
    tokens, heads = a.q_nope.shape[0], a.q_nope.shape[1]
    if a.q_nope.shape[2] != LATENT:
        yield f"q_nope is {tuple(a.q_nope.shape)}, expected [T, H, {LATENT}]"
    if a.q_pe.shape != (tokens, heads, ROPE):
        yield f"q_pe is {tuple(a.q_pe.shape)}, expected {(tokens, heads, ROPE)}"
    if a.out.shape != a.q_nope.shape:
        yield f"out is {tuple(a.out.shape)}, expected {tuple(a.q_nope.shape)}"
    if a.kv_buffer.shape[-1] != KEY_DIM:
        yield f"kv_buffer rows hold {a.kv_buffer.shape[-1]}, expected {KEY_DIM}"
    if not 1 <= a.max_q <= MAX_Q:
        yield f"draft width {a.max_q} is not within 1 .. {MAX_Q}"
    if not 1 <= heads <= MAX_HEADS:
        yield f"{heads} heads are not within 1 .. {MAX_HEADS}"
    yield from _split_problems(a)
    if not abi.PATH_AUTO <= a.path <= abi.PATH_NARROW:
        yield f"path {a.path} is not within {abi.PATH_AUTO} .. {abi.PATH_NARROW}"
    yield from not_typed(torch.int32, kv_indptr=a.kv_indptr, split_indptr=a.split_indptr)
    yield from not_typed(torch.int64, mask_indptr=a.mask_indptr, out_cache_loc=a.out_cache_loc)
    yield from not_typed(torch.float32, workspace=a.workspace)
    yield from not_index(kv_indices=a.kv_indices, qo_indptr=a.qo_indptr)
    yield from not_dense(
        kv_indptr=a.kv_indptr,
        kv_indices=a.kv_indices,
        qo_indptr=a.qo_indptr,
        out_cache_loc=a.out_cache_loc,
        mask=a.mask,
        mask_indptr=a.mask_indptr,
        workspace=a.workspace,
        split_indptr=a.split_indptr,
    )
    yield from too_short(a.bs + 1, kv_indptr=a.kv_indptr, qo_indptr=a.qo_indptr)
    yield from too_short(plan_size(a.bs), split_indptr=a.split_indptr)
    yield from too_short(a.bs, mask_indptr=a.mask_indptr)
    yield from too_short(tokens, out_cache_loc=a.out_cache_loc)
    yield from too_short(workspace_floats(a.bs, a.max_q, heads, a.all_splits), workspace=a.workspace)
    yield from _mask_problems(a)


def _split_problems(a: VerifyArgs) -> Iterator[str]:
    if a.split_indptr is not None:
        if a.taper:
            yield f"taper {a.taper} with a split_indptr, whose splits are equal"
        if not a.bs <= a.splits <= MAX_PLANNED_SPLITS:
            yield f"{a.splits} planned splits are not within {a.bs} (requests) .. {MAX_PLANNED_SPLITS}"
        return
    if not 1 <= a.nsplit <= MAX_SPLITS:
        yield f"nsplit {a.nsplit} is not within 1 .. {MAX_SPLITS}"
    if not 0 <= a.taper <= min(a.nsplit - 1, MAX_TAPER):
        yield f"taper {a.taper} is not within 0 .. {min(a.nsplit - 1, MAX_TAPER)}"
    if a.all_splits > MAX_GRID_SPLITS:
        yield f"{a.bs} requests of {a.nsplit} splits are more than {MAX_GRID_SPLITS} splits"
    rows = a.all_splits * a.max_q * a.q_nope.shape[1]
    if a.nsplit > 1 and rows > MAX_PARTIALS:
        yield f"{a.all_splits} splits of {a.max_q} tokens are {rows} partial rows, over {MAX_PARTIALS}; lower nsplit"
    if a.splits:
        yield f"{a.splits} splits without a split_indptr; nsplit says how many each request gets"


def _mask_problems(a: VerifyArgs) -> Iterator[str]:
    if not abi.MASK_NONE <= a.mask_kind <= abi.MASK_QLEN:
        yield f"mask_kind {a.mask_kind} is not within 0 .. 3"
    if a.mask_kind == abi.MASK_NONE:
        return
    if a.mask is None:
        yield f"mask_kind {a.mask_kind} needs a mask"
        return
    packed = a.mask_kind == abi.MASK_PACKED
    if a.mask.element_size() != (8 if packed else 1):
        yield f"mask is {a.mask.dtype}, expected {_mask_dtype(packed)} for kind {a.mask_kind}"
    if packed:
        yield from too_short(a.bs * a.max_q * mask_words(a.max_q), mask=a.mask)
    if a.mask_kind == abi.MASK_FULL and a.mask_indptr is None:
        yield "a FULL mask needs mask_indptr"


def _mask_dtype(packed: bool) -> str:
    return "64-bit words" if packed else "bool or uint8"


def _layout_problems(a: VerifyArgs) -> Iterator[str]:
    """What only the kernels ask for."""
    dtype = a.q_nope.dtype
    if dtype not in _DTYPES:
        yield f"q is {dtype}, expected bfloat16 or float16"
    yield from not_typed(dtype, q_pe=a.q_pe, out=a.out)
    if not paths.reads(dtype, a.kv_buffer.dtype):
        yield f"kv_buffer is {a.kv_buffer.dtype}, expected {dtype}, or an fp8 where q is bfloat16"
    last = (a.q_nope.stride(2), a.q_pe.stride(2), a.kv_buffer.stride(-1), a.out.stride(2))
    if last != (1, 1, 1, 1):
        yield f"the last dimension of q_nope, q_pe, kv_buffer, out has strides {last}, expected 1"
    if (a.kv_buffer.stride(0) * a.kv_buffer.element_size() | a.kv_buffer.data_ptr()) % 16:
        yield "rows of kv_buffer must be 16-byte aligned"
    pairs = a.q_nope.stride(0) | a.q_nope.stride(1) | a.q_pe.stride(0) | a.q_pe.stride(1)
    if pairs % 2 or (a.q_nope.data_ptr() | a.q_pe.data_ptr()) % 4:
        yield "q must be 4-byte aligned"
    if a.path == abi.PATH_HOPPER and (pairs % 8 or (a.q_nope.data_ptr() | a.q_pe.data_ptr()) % 16):
        yield "the Hopper path needs q 16-byte aligned; the portable one serves what is not"
    if a.workspace.data_ptr() % 16:
        yield "workspace must be 16-byte aligned"
    if (a.out.stride(0) | a.out.stride(1)) % 4 or a.out.data_ptr() % 8:
        yield "rows of out must be 8-byte aligned"


def verify_params(a: VerifyArgs) -> abi.VerifyParams:
    """The arguments of tv_mla_verify.

    Raises:
        ValueError: they are wrong; the message says which.
    """
    check(_verify_problems(a))
    check(_layout_problems(a))
    scaled = a.kv_buffer.dtype in paths.FP8  # by the kernels; else what they would have to do is done around them
    return abi.VerifyParams(
        q_nope=a.q_nope.data_ptr(),
        q_pe=a.q_pe.data_ptr(),
        kv=a.kv_buffer.data_ptr(),
        kv_indptr=a.kv_indptr.data_ptr(),
        kv_indices=a.kv_indices.data_ptr(),
        qo_indptr=a.qo_indptr.data_ptr(),
        out_cache_loc=_pointer(a.out_cache_loc),
        mask=_pointer(a.mask),
        mask_indptr=_pointer(a.mask_indptr),
        out=a.out.data_ptr(),
        workspace=a.workspace.data_ptr(),
        split_indptr=_pointer(a.split_indptr),
        q_nope_stride_t=a.q_nope.stride(0),
        q_nope_stride_h=a.q_nope.stride(1),
        q_pe_stride_t=a.q_pe.stride(0),
        q_pe_stride_h=a.q_pe.stride(1),
        kv_stride=a.kv_buffer.stride(0),
        out_stride_t=a.out.stride(0),
        out_stride_h=a.out.stride(1),
        mask_numel=a.mask.numel() if a.mask is not None else 0,
        kv_index_bytes=INDEX_BYTES[a.kv_indices.dtype],
        qo_index_bytes=INDEX_BYTES[a.qo_indptr.dtype],
        dtype=_DTYPES[a.q_nope.dtype],
        mask_kind=a.mask_kind,
        mask_words=mask_words(a.max_q),
        bs=a.bs,
        tokens=a.q_nope.shape[0],
        heads=a.q_nope.shape[1],
        max_q=a.max_q,
        splits=a.all_splits,
        path=a.path,
        taper=a.taper,
        sm_scale=a.sm_scale if scaled else a.sm_scale * a.k_scale,
        logit_cap=a.logit_cap,
        kv_dtype=paths.FP8.get(a.kv_buffer.dtype, _DTYPES[a.q_nope.dtype]),
        k_scale=a.k_scale if scaled else 1.0,
        slots=a.kv_buffer.shape[0],
    )


def _verify_cuda(*args: Any) -> None:
    a = VerifyArgs(*args)
    launch("mla_verify", verify_params(a), a.q_nope.device)
    if a.k_scale != 1.0 and a.kv_buffer.dtype not in paths.FP8:
        a.out.mul_(a.k_scale)


def _verify_cpu(*args: Any) -> None:
    a = VerifyArgs(*args)
    check(_verify_problems(a))
    a.out.copy_(reference.mla_verify(*a[:12], a.sm_scale, a.logit_cap, a.k_scale))


def _pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _nothing(*args: Any) -> None:
    """Fake of all ops: they return nothing and write into buffers of known shape."""


for _name, _cuda, _cpu in (
    ("mla_prep", _prep_cuda, _prep_cpu),
    ("mla_plan", _plan_cuda, _plan_cpu),
    ("mla_verify", _verify_cuda, _verify_cpu),
):
    _lib.impl(_name, _cuda, "CUDA")
    _lib.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"treeverify::{_name}", _nothing, lib=_lib)

mla_prep = torch.ops.treeverify.mla_prep
mla_plan = torch.ops.treeverify.mla_plan
mla_verify = torch.ops.treeverify.mla_verify
