# SPDX-License-Identifier: Apache-2.0
"""What the CUDA graph runner asks and tells the backend that verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verifier import Verifier


def verifying_backend_of(attn_backend: Any) -> Any:
    """The backend that runs TARGET_VERIFY below `attn_backend`, as far as wrappers can be looked into.

    The graph runner holds the outermost backend: HybridAttnBackend picks one of two by speculative_attention_mode,
    hybrid models keep their full-attention backend inside another one.
    """
    backend = attn_backend
    while not hasattr(backend, "tree_verify"):
        if hasattr(backend, "_select_backend"):
            from sglang.srt.model_executor.forward_batch_info import ForwardMode

            backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
        elif hasattr(backend, "full_attn_backend"):
            backend = backend.full_attn_backend
        else:
            break
    return backend


def verifier_of(attn_backend: Any) -> Verifier | None:
    """treeverify's part of the backend that runs TARGET_VERIFY below `attn_backend`, None where stock code does."""
    found = attn_backend.__dict__.get("_treeverify", attn_backend)
    if found is not attn_backend:
        return found
    attn_backend._treeverify = getattr(verifying_backend_of(attn_backend), "tree_verify", None)
    return attn_backend._treeverify


def hand_over_raw_bs(attn_backend: Any, raw_bs: int) -> None:
    """Tells the verifying backend how many requests of the next replay are real; the rest is padding."""
    verifier = verifier_of(attn_backend)
    if verifier is not None:
        verifier.raw_bs = raw_bs


def capture_mask_numel(attn_backend: Any) -> int | None:
    """Elements the runner's bool mask buffer needs: 1 where treeverify serves (no capture reads it), None as stock."""
    return None if verifier_of(attn_backend) is None else 1
