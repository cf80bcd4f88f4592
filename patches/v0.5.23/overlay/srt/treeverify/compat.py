# SPDX-License-Identifier: Apache-2.0
"""What SGLang v0.5.23 has elsewhere than other pins. Every pin has this module, with the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def settings(model_runner: ModelRunner) -> Any:
    """The server's arguments as SGLang has completed them: the runner's `server_args` are what the user typed."""
    return _Settings()


class _Settings:
    """Reads the runtime context, under the names that the arguments of other releases have."""

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)

    def get_attention_backends(self) -> tuple[str, str]:
        """Names of the backends for prefill and for decode."""
        from sglang.srt.runtime_context import attention_backends

        prefill, decode = attention_backends()
        return prefill, decode


def attention_ranks() -> int:
    """GPUs that share the heads of a layer."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def kv_ranks(server_args: Any) -> int:
    """GPUs that share the KV of a request (decode context parallelism)."""
    return int(server_args.dcp_size)
