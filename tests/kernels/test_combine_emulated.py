# SPDX-License-Identifier: Apache-2.0
"""The combine kernel's own code on an emulated block (emulator/machine.h says what is real), against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from treeverify.attention import cases, ops, plan


@pytest.fixture(scope="session")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    lib = emulator_build("combine")
    lib.tv_emulate_combine.restype = ctypes.c_char_p
    lib.tv_emulate_combine.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    return lib


Merge = Callable[..., torch.Tensor]


@pytest.fixture
def merge(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Merge:
    """merge(case, blocks=1, order=0): the output that the kernel makes of the case's workspace."""

    def merge(case: cases.Case, blocks: int = 1, order: int = 0) -> torch.Tensor:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            assert what == "mla_verify"
            error = library.tv_emulate_combine(ctypes.byref(params), blocks, order)
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(ops, "mla_verify", ops._verify_cuda)
        monkeypatch.setattr(ops, "launch", launch)
        case.out.fill_(float("nan"))
        case.run()
        return case.out.clone()

    return merge


def active(kv: int, nsplit: int, taper: int) -> int:
    """Splits that have KV: those that leave a partial result."""
    return sum(length > 0 for length in plan.split_lengths(kv, plan.Cut(nsplit, taper)))


def fill(case: cases.Case, seed: int = 0) -> torch.Tensor:
    """Draws what active splits leave, some rows of some unseen, NaN elsewhere. Returns the output."""
    generator = torch.Generator().manual_seed(seed)
    heads, splits = case.q_nope.shape[1], case.splits or case.bs * case.nsplit
    rows, tokens = case.n * heads, case.qo_indptr.tolist()
    case.poison()
    parts = case.workspace[: splits * rows * plan.LATENT].view(splits, rows, plan.LATENT)
    lse = case.workspace[splits * rows * plan.LATENT :].view(splits, rows)
    shares = plan.planned(case.kv_lens, case.splits) if case.splits else None
    expected = torch.full(case.out.shape, float("nan"), dtype=torch.float64)
    expected[tokens[-1] :] = 0
    for i in range(case.bs):
        b = i if shares is None else shares[case.bs + 1 + i]
        first, end = (i * case.nsplit, (i + 1) * case.nsplit) if shares is None else shares[i : i + 2]
        count = active(case.kv_lens[b], end - first, case.taper if shares is None else 0)
        mine = (tokens[b + 1] - tokens[b]) * heads
        if count <= 1:
            continue  # verify writes the output itself
        part = torch.randn(count, mine, plan.LATENT, generator=generator)
        top = torch.randn(count, mine, generator=generator) * 20
        top[torch.rand(count, mine, generator=generator) < 0.2] = -math.inf
        top[:, 0] = -math.inf  # a row that sees nothing
        parts[first : first + count, :mine], lse[first : first + count, :mine] = part, top
        weights = torch.softmax(top.double() * math.log(2), 0).nan_to_num(0)
        expected[tokens[b] : tokens[b + 1]] = (weights[..., None] * part).sum(0).view(-1, heads, plan.LATENT)
    return expected


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares, and sees to it that rows of requests with one split are left alone."""
    alone = expected.isnan()
    assert torch.equal(out.isnan(), alone)
    torch.testing.assert_close(out.double()[~alone], expected[~alone], rtol=2**-8, atol=1e-5)


def make_case(prefixes: list[int], n: int, heads: int, **more: object) -> cases.Case:
    return cases.make_case(prefixes, n, heads, device="cpu", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("nsplit", [2, 8, 9, 16, 17, 32, 33, 66, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_splits_of_any_number(merge, dtype, nsplit):
    """All of them active in the first request, a few in the next two, one or none in the last."""
    case = make_case([64 * nsplit - 3, 500, 70, 30], 3, 1, dtype=dtype, nsplit=nsplit, padded=1)
    expected = fill(case)
    check(merge(case), expected)


@pytest.mark.parametrize("blocks", [1, 2, 7])
@pytest.mark.parametrize("nsplit", [2, 20])
def test_blocks_of_any_number(merge, blocks, nsplit):
    """Fewer than there are pieces of rows, and more: the bits are the same, whatever the order of warps."""
    case = make_case([1500], 3, 5, nsplit=nsplit, extra_tokens=3)
    expected = fill(case)
    first = merge(case)
    check(first, expected)
    for order in (1, 2):
        assert torch.equal(merge(case, blocks, order), first)


@pytest.mark.parametrize("taper", [1, 3])
def test_halved_splits(merge, taper):
    """All of them active, some, one."""
    case = make_case([9000, 2500, 900, 30], 2, 3, nsplit=4, taper=taper, padded=1)
    expected = fill(case)
    check(merge(case, 2), expected)


@pytest.mark.parametrize("splits", [4, 30])
def test_a_plan(merge, splits):
    case = dataclasses.replace(make_case([3000, 10, 900], 2, 3, padded=1, extra_tokens=1), splits=splits + 4)
    expected = fill(case)
    check(merge(case, 2), expected)


def test_draft_widths_may_differ(merge):
    case = make_case([500, 0, 900], 5, 3, nsplit=6)
    widths = [2, 0, 5]
    case.kv_lens = [p + w for p, w in zip([500, 0, 900], widths, strict=True)]
    case.qo_indptr = torch.tensor([0, *widths]).cumsum(0)
    case.kv_indptr = torch.tensor([0, *case.kv_lens]).cumsum(0).int()
    expected = fill(case)
    check(merge(case, 2), expected)


def test_weights_of_other_splits_fail_the_same_check(merge):
    case = make_case([500], 3, 1, nsplit=4)
    expected = fill(case)
    lse = case.workspace[4 * 3 * plan.LATENT :].view(4, 3)
    lse[:, 1] = lse[:, 1].flip(0)
    with pytest.raises(AssertionError):
        check(merge(case), expected)
