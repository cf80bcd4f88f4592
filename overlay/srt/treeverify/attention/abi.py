# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of kernels/params.h and the loader of libtreeverify."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

MASK_NONE, MASK_PACKED, MASK_FULL, MASK_QLEN = range(4)
PATH_AUTO, PATH_PORTABLE, PATH_HOPPER, PATH_NARROW = range(4)
FEW_ROWS = 8
"""PATH_AUTO takes the portable path for requests of no more query rows, where the pool is fp8."""
BF16, FP16, FP8_E4M3, FP8_E5M2 = range(4)

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class VerifyParams(ctypes.Structure):
    """TvVerifyParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("q_nope", "q_pe", "kv", "kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc")),
        *((name, _P) for name in ("mask", "mask_indptr", "out", "workspace", "split_indptr")),
        *((name, _I64) for name in ("q_nope_stride_t", "q_nope_stride_h", "q_pe_stride_t", "q_pe_stride_h")),
        *((name, _I64) for name in ("kv_stride", "out_stride_t", "out_stride_h", "mask_numel")),
        *((name, _I32) for name in ("kv_index_bytes", "qo_index_bytes", "dtype", "mask_kind", "mask_words")),
        *((name, _I32) for name in ("bs", "tokens", "heads", "max_q", "splits", "path", "taper")),
        *((name, _F32) for name in ("sm_scale", "logit_cap")),
        ("kv_dtype", _I32),
        ("k_scale", _F32),
        ("slots", _I64),
    ]


class PlanParams(ctypes.Structure):
    """TvPlanParams, field by field."""

    _fields_ = [("kv_indptr", _P), ("split_indptr", _P), ("bs", _I32), ("splits", _I32)]


class PrepParams(ctypes.Structure):
    """TvPrepParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("req_to_token", "req_pool_indices", "seq_lens", "custom_mask")),
        *((name, _P) for name in ("kv_indptr", "kv_indices", "packed_mask")),
        *((name, _I64) for name in ("row_stride", "kv_capacity", "mask_numel")),
        *((name, _I32) for name in ("seq_len_bytes", "kv_index_bytes", "mask_kind", "raw_bs", "bs", "n")),
        ("rows", _I64),
    ]


def library_path() -> Path:
    """Where libtreeverify is expected: $TREEVERIFY_LIBRARY, else beside this package."""
    override = os.environ.get("TREEVERIFY_LIBRARY")
    return Path(override) if override else Path(__file__).resolve().parent.parent / "_kernels" / "libtreeverify.so"


@functools.cache
def library() -> ctypes.CDLL:
    """libtreeverify with its argument types declared; `entry` has those of the launches.

    Raises:
        RuntimeError: the library is not there or does not load.
    """
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        raise RuntimeError(
            f"treeverify: cannot load its kernels from {path}: {e}. `apply.py apply --sglang DIR` on this machine "
            "builds and installs them."
        ) from e
    lib.tv_mla_path.argtypes = [*4 * [ctypes.c_int], *3 * [ctypes.POINTER(ctypes.c_int)]]
    lib.tv_kernel_info.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_int),
    ]
    lib.tv_error_string.argtypes = [ctypes.c_int]
    lib.tv_error_string.restype = ctypes.c_char_p
    return lib


@functools.cache
def entry(what: str) -> Callable[[object, int], int]:
    """tv_<what>, which takes the address of its parameters and a stream, and returns a cudaError_t."""
    found = getattr(library(), f"tv_{what}")
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return cast("Callable[[object, int], int]", found)


def check(code: int, what: str) -> None:
    """Raises RuntimeError with CUDA's own words where `code`, returned by `what`, is not 0."""
    if code:
        raise RuntimeError(f"treeverify: {what} failed: {library().tv_error_string(code).decode()} (cudaError {code})")
