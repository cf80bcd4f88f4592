# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of kernels/kv/params.h."""

from __future__ import annotations

import ctypes

_P, _I32 = ctypes.c_void_p, ctypes.c_int32


class MoveParams(ctypes.Structure):
    """TvKvMoveParams, field by field."""

    _fields_ = [
        *((name, _P) for name in ("bases", "row_bytes", "src", "dst", "count")),
        ("slots", ctypes.c_int64),
        *((name, _I32) for name in ("index_bytes", "capacity", "group", "buffers", "longest")),
    ]
