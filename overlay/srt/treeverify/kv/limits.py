# SPDX-License-Identifier: Apache-2.0
"""kernels/kv/cut.h's limits."""

PIECE_BYTES = 16
"""Rows are multiples of it, and start at multiples of it."""

MAX_GROUP = 256
"""Entries that can be read before any of them is written."""
