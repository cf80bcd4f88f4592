# SPDX-License-Identifier: Apache-2.0
"""The Hopper path's loading warpgroup on pools of fp8, its own code on an emulated block (emulator/machine.h).

What lands must be the rows, widened exactly, where wgmma's 128-byte swizzle looks for them. The order of warps and
copies is random; a place is given back only when the next tile has landed whole, as late as the kernels ever do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from treeverify.attention import abi

TILE, DIM, PANELS = 64, 576, 9
FORMATS = {torch.float8_e4m3fn: abi.FP8_E4M3, torch.float8_e5m2: abi.FP8_E5M2}
ROWS = [32, 72, 64]  # row tiles: raw bytes apart, in place, and in place in the kernel for many rows


@pytest.fixture(scope="module")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    lib = emulator_build("hopper_loader")
    lib.tv_emulate_loader.restype = ctypes.c_char_p
    lib.tv_emulate_loader.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p, ctypes.c_int64]
    lib.tv_emulate_loader.argtypes += [ctypes.c_uint64, ctypes.c_bool]
    lib.tv_loads_apart.restype = ctypes.c_bool
    return lib


class Request:
    """One request on a pool of all byte patterns, its rows shuffled; `draft` of them by way of out_cache_loc."""

    def __init__(self, dtype: torch.dtype, kv_len: int, draft: int = 0, wide: bool = False, stride: int = DIM):
        random = torch.Generator().manual_seed(kv_len + draft)
        self.pool = torch.randint(0, 256, (kv_len + 7, stride), generator=random, dtype=torch.uint8)
        self.slots = torch.randperm(kv_len + 7, generator=random)[:kv_len]
        self.rows = self.pool[:, :DIM].view(dtype)[self.slots].to(torch.bfloat16)
        self.indices = self.slots[: kv_len - draft].to(torch.int64 if wide else torch.int32).contiguous()
        self.loc = self.slots[kv_len - draft :].contiguous()
        self.kv_indptr = torch.tensor([0, kv_len - draft], dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, max(draft, 1)], dtype=torch.int32)
        self.params = abi.VerifyParams(
            kv=self.pool.data_ptr(),
            kv_indptr=self.kv_indptr.data_ptr(),
            kv_indices=self.indices.data_ptr(),
            qo_indptr=self.qo_indptr.data_ptr(),
            out_cache_loc=self.loc.data_ptr() if draft else None,
            kv_stride=stride,
            kv_index_bytes=8 if wide else 4,
            qo_index_bytes=4,
            kv_dtype=FORMATS[dtype],
            bs=1,
            tokens=max(draft, 1),
            heads=8,
        )


def landed(library: ctypes.CDLL, request: Request, rows: int, begin: int, end: int, order: int, waits_hold=True):
    """The positions of begin .. end as the computing warpgroups find them, and zeros up to a whole tile."""
    tiles = -(-(end - begin) // TILE)
    raw = torch.zeros(tiles, PANELS, TILE, 8, 8, dtype=torch.bfloat16)  # panel, row, chunk of 16 bytes, element
    error = library.tv_emulate_loader(
        ctypes.byref(request.params), rows, begin, end, raw.data_ptr(), request.pool.numel(), order, waits_hold
    )
    assert error is None, error.decode()
    row, chunk = torch.meshgrid(torch.arange(TILE), torch.arange(8), indexing="ij")
    found = raw[:, :, row, chunk ^ (row % 8)]
    return found.permute(0, 2, 1, 3, 4).reshape(tiles * TILE, DIM)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with every NaN as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0).view(torch.int16), b.nan_to_num(0).view(torch.int16)
    )


def test_where_raw_bytes_lie(library):
    assert [library.tv_loads_apart(rows) for rows in ROWS] == [True, False, False]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_land_widened(library, dtype, rows):
    request = Request(dtype, 400)
    for order, (begin, end) in enumerate([(0, 400), (0, 1), (64, 128), (128, 255), (192, 400), (0, 65)]):
        found = landed(library, request, rows, begin, end, order)
        assert same_bits(found[: end - begin], request.rows[begin:end])
        assert (found[end - begin :] == 0).all(), "behind the end: zeros, which are no NaN for P = 0 to meet"


@pytest.mark.parametrize("rows", ROWS)
def test_both_sources_wide_indices_and_a_wider_pool(library, rows):
    request = Request(torch.float8_e4m3fn, 300, draft=9, wide=True, stride=592)
    assert same_bits(landed(library, request, rows, 128, 300, 7)[:172], request.rows[128:])


@pytest.mark.parametrize("rows", ROWS)
def test_without_its_waits_it_is_wrong(library, rows):
    request = Request(torch.float8_e4m3fn, 400)
    with pytest.raises(AssertionError):
        assert same_bits(landed(library, request, rows, 0, 400, 0, waits_hold=False)[:400], request.rows)
