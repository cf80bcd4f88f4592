# SPDX-License-Identifier: Apache-2.0
"""The portable verify kernel's own code on an emulated block (emulator/machine.h says what is real), against float64.

For machines without a GPU. What it can't see, tests/gpu does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from emulated_steps import LIMIT, check, draw_case, draw_step, merged
from treeverify.attention import abi, cases, ops, paths, reference

SEEDS = range(6)
INSTANCES = [
    ("Narrow<8>", torch.bfloat16),
    ("Narrow<40>", torch.bfloat16),
    ("Narrow<48>", torch.bfloat16),
    ("Wide<48>", torch.bfloat16),
    ("Narrow<40>", torch.float16),
    ("Narrow<8>", torch.float8_e4m3fn),
    ("Narrow<40>", torch.float8_e5m2),
    ("Wide<32>", torch.float8_e4m3fn),
    ("Wide<48>", torch.float8_e4m3fn),
]
"""Shapes, and what the pool holds; queries are of the same dtype, or bf16 where that is an fp8."""


@pytest.fixture(scope="session")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    lib = emulator_build("launch")
    lib.tv_emulate.restype = ctypes.c_char_p
    lib.tv_emulate.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_bool]
    return lib


Run = Callable[..., torch.Tensor]


@pytest.fixture
def run(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(case, instance, order=0, waits_hold=True): the output, splits merged; `order` seeds that of the warps."""

    def run(case: cases.Case, instance: str, order: int = 0, waits_hold: bool = True) -> torch.Tensor:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            assert what == "mla_verify"
            pool = case.pool.nbytes
            error = library.tv_emulate(ctypes.byref(params), instance.encode(), pool, order, waits_hold)
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(ops, "mla_verify", ops._verify_cuda)
        monkeypatch.setattr(ops, "launch", launch)
        case.poison()
        case.run()
        return merged(case, library)

    return run


def rows_of(instance: str) -> int:
    return int(instance.strip("NarowWide<>"))


def test_the_draws_reach_every_form():
    drawn = [draw_case(seed, rows_of(instance), dtype) for instance, dtype in INSTANCES for seed in SEEDS]
    assert {case.mask_kind for case in drawn} == {abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN}
    for form in (
        {case.out_cache_loc is None for case in drawn},
        {case.kv_indices.dtype == torch.int32 for case in drawn},
        {case.qo_indptr.dtype == torch.int32 for case in drawn},
        {case.splits > 0 for case in drawn},
        {case.nsplit > 1 for case in drawn},
        {case.taper > 0 for case in drawn},
        {case.logit_cap > 0 for case in drawn},
        {0 in case.kv_lens for case in drawn},
        {float(case.q_nope.std()) > 2 for case in drawn},
        {case.q_nope.shape[0] > case.bs * case.n for case in drawn},
    ):
        assert form == {False, True}


@pytest.mark.parametrize(("instance", "dtype"), INSTANCES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps(run, instance, dtype, seed):
    case = draw_case(seed, rows_of(instance), dtype)
    check(case, run(case, instance, order=seed))


@pytest.mark.parametrize("nsplit", [1, 3])
@pytest.mark.parametrize("widths", [[6, 0, 9], [0, 0, 0]])
@pytest.mark.parametrize(("instance", "dtype"), INSTANCES)
def test_draft_widths_may_differ(run, instance, dtype, widths, nsplit):
    prefixes = [100, 0, 150]
    case = draw_step(prefixes, 9, 3, dtype, nsplit=nsplit)
    case.kv_lens = [p + w for p, w in zip(prefixes, widths, strict=True)]
    case.qo_indptr = torch.tensor([0, *widths]).cumsum(0)
    case.kv_indptr = torch.tensor([0, *case.kv_lens]).cumsum(0).int()
    check(case, run(case, instance))


@pytest.mark.parametrize(("instance", "dtype"), INSTANCES[1:2])
def test_halved_splits(run, instance, dtype):
    """All three of them, two, one."""
    case = draw_step([1000, 500, 40], 5, 3, dtype, nsplit=3, taper=1)
    check(case, run(case, instance))


@pytest.mark.parametrize("n", [4, 70])
@pytest.mark.parametrize(("instance", "dtype"), INSTANCES)
def test_a_row_that_sees_nothing_is_zero(run, instance, dtype, n):
    """The wider tree has two splits, and a mask of two words a row."""
    case = draw_step([0], n, 1, dtype, nsplit=2)
    case.visible[0, 2] = False
    case.mask = reference.pack_mask(case.visible)
    out = run(case, instance)
    check(case, out)
    assert not out[2].any()


@pytest.mark.parametrize(
    ("instance", "dtype", "nsplit"),
    [(*pair, nsplit) for pair in INSTANCES for nsplit in ((1,) if pair[1] in paths.FP8 else (1, 2))],
)
def test_the_order_of_warps_changes_no_bit(run, instance, dtype, nsplit):
    """A context that wraps around the table of slots, and the stages many times."""
    case = draw_step([40, 700], 7, 8, dtype, nsplit=nsplit)
    first = run(case, instance)
    check(case, first)
    for order in (1, 2):
        assert torch.equal(run(case, instance, order), first)


@pytest.mark.parametrize("dtype", paths.FP8)
def test_every_byte_is_widened_exactly(library, dtype):
    """By every way that fragments take, and without the instruction that sm_80 and sm_86 have not."""
    ways = range(5 if dtype == torch.float8_e4m3fn else 4)
    meant = torch.arange(256, dtype=torch.uint8).view(dtype).half()
    for way in ways:
        bits = torch.tensor([library.tv_widen(paths.FP8[dtype], byte, way) for byte in range(256)])
        assert (bits >= 0).all(), "both places that a way fills are the same"
        assert torch.equal(bits.short().view(torch.half).isnan(), meant.isnan())
        assert torch.equal(bits.short()[~meant.isnan()], meant.view(torch.short)[~meant.isnan()])


@pytest.mark.parametrize("size", [2.0**-90, 2.0**-10, 2.0**30, 2.0**100])
def test_queries_of_any_size(run, size):
    """What bf16 holds and fp16 does not: scores are those of queries a power of 2 larger or smaller."""
    case = draw_step([70], 5, 3, torch.float8_e4m3fn, nsplit=1)
    expected = run(case, "Narrow<8>").clone()
    check(case, expected)
    case.q_nope, case.q_pe, case.sm_scale = case.q_nope * size, case.q_pe * size, case.sm_scale / size
    assert torch.equal(run(case, "Narrow<8>"), expected)


@pytest.mark.parametrize("wild", [math.inf, math.nan])
@pytest.mark.parametrize(("instance", "dtype"), [pair for pair in INSTANCES if pair[1] in paths.FP8])
def test_a_row_of_wild_queries_spoils_no_other(run, instance, dtype, wild):
    case = draw_step([70], 5, 3, dtype, nsplit=1)
    expected = case.expected()
    case.q_nope[2, 1, 300] = wild
    out, spoilt = run(case, instance), torch.zeros(5, 3, dtype=torch.bool)
    spoilt[2, 1] = True
    assert out[spoilt].isnan().all()
    assert reference.worst_row_error(out[~spoilt], expected[~spoilt]) <= LIMIT


def test_no_two_threads_keep_queries_of_an_fp8_pool_in_one_place(library):
    """They would write and read it with no barrier between: the same bits, but a race."""
    assert library.tv_places_of_queries() == 256


@pytest.mark.parametrize("dtype", paths.FP8)
def test_what_the_pool_has_as_nan_is_nan(run, dtype):
    case = draw_step([70], 5, 3, dtype, nsplit=1)
    case.pool[case.kv_indices[9], 0, 300] = float("nan")
    out = run(case, "Narrow<8>" if dtype == torch.float8_e4m3fn else "Narrow<40>")
    assert out.isnan().all()


@pytest.mark.parametrize(("instance", "dtype"), INSTANCES)
def test_a_dropped_mask_fails_the_same_check(run, instance, dtype):
    case = draw_step([64, 90], 12, 4, dtype, nsplit=2)
    check(case, run(case, instance))
    case.mask_kind = abi.MASK_NONE
    assert reference.worst_row_error(run(case, instance), case.expected()) > 10 * LIMIT


@pytest.mark.parametrize(("instance", "dtype"), INSTANCES)
def test_waits_that_do_not_wait_fail_the_same_check(run, instance, dtype):
    """Within a batch of slots, so that no slot is read before it is there: it would lead anywhere."""
    case = draw_step([200], 5, 8, dtype, nsplit=1)
    check(case, run(case, instance))
    with pytest.raises(AssertionError):
        check(case, run(case, instance, waits_hold=False))
