# SPDX-License-Identifier: Apache-2.0
"""What SGLang v0.5.12.post1 has elsewhere than other pins. Every pin has this module, with the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

SPEC_V2 = False
"""Whether workers are of SGLang's spec v2: the scheduler reserves their slots, and runs ahead of the device."""


def settings(model_runner: ModelRunner) -> ServerArgs:
    """The server's arguments, as far as SGLang has completed them."""
    return model_runner.server_args


def attention_ranks() -> int:
    """GPUs that share the heads of a layer."""
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    return int(get_attention_tp_size())


def kv_ranks(server_args: ServerArgs) -> int:
    """GPUs that share the KV of a request; this release has no decode context parallelism."""
    return 1


def is_recurrent(runner: ModelRunner) -> bool:
    """Whether the model has layers with a state (Mamba, linear attention)."""
    return runner.mambaish_config is not None or hasattr(runner.attn_backend, "update_mamba_state_after_mtp_verify")


def choose_draft_backend(server_args: ServerArgs) -> None:
    """Fills in the drafter's attention backend as DFLASH does; this release does so in the worker."""


def resolved(server_args: ServerArgs) -> Any:
    """The arguments with what SGLang has decided so far: this release writes that into them."""
    return server_args
