# SPDX-License-Identifier: Apache-2.0
"""What SGLang v0.5.17 has elsewhere than other pins. Every pin has this module, with the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def attention_ranks() -> int:
    """GPUs that share the heads of a layer."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def kv_ranks(server_args: ServerArgs) -> int:
    """GPUs that share the KV of a request (decode context parallelism)."""
    return int(server_args.dcp_size)
