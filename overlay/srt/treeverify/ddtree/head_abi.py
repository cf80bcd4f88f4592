# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of kernels/head/params.h, and the limits that kernels/head/keys.h sets."""

from __future__ import annotations

import ctypes

SLICE = 8192
"""Logits behind a list."""
MAX_K = 255
"""Candidates of a list."""
MAX_MERGED = 16384
"""Candidates in all lists of a row."""

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class ListsParams(ctypes.Structure):
    """TvTopkListsParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("logits", "lists")),
        *((name, _I64) for name in ("logits_stride", "lists_stride")),
        *((name, _I32) for name in ("dtype", "rows", "vocab", "first_id", "count", "k")),
    ]


class MergeParams(ctypes.Structure):
    """TvTopkMergeParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("lists", "ids", "logprobs")),
        *((name, _I32) for name in ("ranks", "rows", "count", "k")),
    ]
