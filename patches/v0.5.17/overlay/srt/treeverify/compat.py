# SPDX-License-Identifier: Apache-2.0
"""What SGLang v0.5.17 has elsewhere than other pins. Every pin has this module, with the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

SPEC_V2 = True
"""Whether workers are of SGLang's spec v2: the scheduler reserves their slots, and runs ahead of the device."""


def settings(model_runner: ModelRunner) -> ServerArgs:
    """The server's arguments, as far as SGLang has completed them."""
    return model_runner.server_args


def attention_ranks() -> int:
    """GPUs that share the heads of a layer."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def kv_ranks(server_args: ServerArgs) -> int:
    """GPUs that share the KV of a request (decode context parallelism)."""
    return int(server_args.dcp_size)


def is_recurrent(runner: ModelRunner) -> bool:
    """Whether the model has layers with a state (Mamba, linear attention)."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(runner.model_config) is not None


def choose_draft_backend(server_args: ServerArgs) -> None:
    """Fills in the drafter's attention backend as DFLASH does."""
    from sglang.srt.arg_groups.speculative_hook import _resolve_dflash_draft_attention_backend

    _resolve_dflash_draft_attention_backend(server_args)


def resolved(server_args: ServerArgs) -> Any:
    """The arguments with what SGLang has decided so far, to read while it still decides."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)
