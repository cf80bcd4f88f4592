# SPDX-License-Identifier: Apache-2.0
"""kv/abi.py mirrors kernels/kv/params.h, the op's limits are the kernel's, and no move is left to nobody."""

from __future__ import annotations

import ctypes

from treeverify.kv import abi, limits


def test_struct_layout(same_layout):
    same_layout("kv/params.h", "TvKvMoveParams", abi.MoveParams)


def test_limits(host_build):
    source = '#include "kv/cut.h"\nextern "C" int limit(int i) { return i ? tv::kv::kMaxGroup : tv::kv::kPieceBytes; }'
    lib = host_build("kv_limits", source)
    assert [lib.limit(0), lib.limit(1)] == [limits.PIECE_BYTES, limits.MAX_GROUP]


def test_a_tile_fits_into_a_blocks_registers_and_tiles_make_up_the_row(host_build):
    source = """
    #include "kv/cut.h"
    extern "C" int ok(int64_t row_bytes, int group) {
      const tv::kv::Cut c = tv::kv::cut(row_bytes, group);
      const int64_t pieces = row_bytes / tv::kv::kPieceBytes;
      return c.rows >= 1 && c.rows <= tv::kv::kMaxGroup && (!group || c.rows == group) && c.width >= 1 &&
             int64_t(c.rows) * c.width <= tv::kv::kThreads * tv::kv::kHeld && int64_t(c.across) * c.width >= pieces &&
             int64_t(c.across - 1) * c.width < pieces;
    }"""
    lib = host_build("kv_cut", source)
    lib.ok.argtypes = [ctypes.c_int64, ctypes.c_int]
    sizes = [16, 32, 48, 576, 1152, 2048, 32752, 32768, 32784, 1 << 20]
    assert all(lib.ok(row_bytes, group) for row_bytes in sizes for group in range(limits.MAX_GROUP + 1))
