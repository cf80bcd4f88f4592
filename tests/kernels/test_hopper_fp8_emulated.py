# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel for pools of fp8, its own code on an emulated block (emulator/machine.h), against float64.

Products with wgmma take place as late as they may, and copies arrive late: what is read too early, or overwritten too
early, comes out wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from emulated_steps import check, draw_case, draw_step, merged
from treeverify.attention import cases, ops

ROWS = [32, 72]


@pytest.fixture(scope="module")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    lib = emulator_build("hopper_fp8")
    lib.tv_emulate_hopper_fp8.restype = ctypes.c_char_p
    lib.tv_emulate_hopper_fp8.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_bool]
    return lib


Run = Callable[..., torch.Tensor]


@pytest.fixture
def run(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(case, rows, order=0, waits_hold=True): the output of blocks of `rows`, splits merged."""

    def run(case: cases.Case, rows: int, order: int = 0, waits_hold: bool = True) -> torch.Tensor:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            assert what == "mla_verify"
            error = library.tv_emulate_hopper_fp8(ctypes.byref(params), rows, case.pool.nbytes, order, waits_hold)
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(ops, "mla_verify", ops._verify_cuda)
        monkeypatch.setattr(ops, "launch", launch)
        case.poison()
        case.run()
        return merged(case, library)

    return run


@pytest.mark.parametrize(
    ("seed", "rows", "dtype"),
    [
        (0, 32, torch.float8_e4m3fn),
        (3, 32, torch.float8_e5m2),
        (2, 48, torch.float8_e4m3fn),
        (1, 72, torch.float8_e5m2),
        (4, 72, torch.float8_e4m3fn),
    ],
)
def test_random_steps(run, seed, rows, dtype):
    case = draw_case(seed, rows, dtype)
    check(case, run(case, rows, order=seed))


@pytest.mark.parametrize("rows", ROWS)
def test_many_tiles_and_references_that_move(run, rows):
    """Keys grow along the context, so that sums are scaled again and again."""
    case = draw_step([700], 4, 8, torch.float8_e4m3fn)
    grown = case.pool.float() * torch.linspace(0.1, 3, len(case.pool)).view(-1, 1, 1)
    case.pool.copy_(grown.clamp(-440, 440))
    check(case, run(case, rows, order=1))


def test_several_blocks_of_rows_and_halved_splits(run):
    case = draw_step([1000, 40], 5, 20, torch.float8_e4m3fn, nsplit=3, taper=1)
    check(case, run(case, 72))


@pytest.mark.parametrize("rows", ROWS)
def test_an_infinite_query_takes_its_own_row_along(run, rows):
    case = draw_step([100], 3, 8, torch.float8_e4m3fn)
    clean = run(case, rows)
    case.q_nope[0, 0, 5] = float("inf")
    assert torch.equal(run(case, rows).flatten(0, 1)[1:], clean.flatten(0, 1)[1:])


@pytest.mark.parametrize("rows", ROWS)
def test_without_its_waits_it_is_wrong(run, rows):
    case = draw_step([400], 4, 8, torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        check(case, run(case, rows, waits_hold=False))
