# SPDX-License-Identifier: Apache-2.0
"""How the backend that verifies takes a tree's mask."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

STOCK = frozenset({"TritonAttnBackend", "FlashInferAttnBackend"})
"""SGLang's own backends that honour custom_mask in TARGET_VERIFY."""


class MaskForm(Enum):
    """What goes with a verify step."""

    PACKED = auto()
    """Bits, one row a node, as the tree builder writes them: treeverify's kernels."""
    FULL = auto()
    """bool [n, prefix + n] a request, one after the other: SGLang's kernels."""


def form_for(attn_backend: Any) -> MaskForm:
    """What the backend that verifies below `attn_backend` takes.

    Raises:
        TreeRefused: it ignores masks.
    """
    from ..attention.graph import verifier_of, verifying_backend_of
    from ..gates import TreeRefused
    from .algorithm import BACKENDS, NAME

    if verifier_of(attn_backend) is not None:
        return MaskForm.PACKED
    name = type(verifying_backend_of(attn_backend)).__name__
    if name not in STOCK:
        raise TreeRefused(
            f"treeverify: {NAME} drafts trees, whose mask {name} ignores; pass --attention-backend "
            + " or ".join(BACKENDS)
        )
    return MaskForm.FULL
