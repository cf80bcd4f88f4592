# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of kernels/tree/params.h."""

from __future__ import annotations

import ctypes

_P, _I32 = ctypes.c_void_p, ctypes.c_int32


class TreeParams(ctypes.Structure):
    """TvTreeParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("logprobs", "ids", "root", "prefix_lens", "tokens", "positions", "parents")),
        *((name, _P) for name in ("depths", "mask", "next_token", "next_sibling", "scores", "sizes")),
        *((name, _I32) for name in ("prefix_len_bytes", "bs", "n", "levels", "ranks")),
    ]


class WalkParams(ctypes.Structure):
    """TvWalkParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("tokens", "next_token", "next_sibling", "sizes", "predicted", "result")),
        *((name, _I32) for name in ("bs", "n", "levels")),
    ]
