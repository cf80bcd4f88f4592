# SPDX-License-Identifier: Apache-2.0
"""Which attention backend a runner gets: what the patch of SGLang's backend set-up calls.

Every full-attention backend of a model runner is made there, halves of a hybrid too; those that a drafter makes for its
steps are not. It costs no import of a backend where treeverify has no say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .. import gates

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

DROPS_MASKS = frozenset({"flashinfer", "flashmla", "cutlass_mla", "trtllm_mla", "tokenspeed_mla", "cutedsl_mla"})
"""MLA backends whose own kernels verify causally, whatever mask a step has."""


def verifying(name: str, model_runner: ModelRunner) -> Callable[[ModelRunner], AttentionBackend] | None:
    """What makes the backend `name` of this runner where treeverify serves its TARGET_VERIFY; None: SGLang's own.

    Raises:
        TreeRefused: a tree is configured and this backend would verify it with the wrong mask.
    """
    if name == "triton":
        asked = not gates.switched_off(gates.TRITON)
    else:
        asked = name in DROPS_MASKS and model_runner.use_mla_backend
    if not asked or not gates.serves(model_runner, name, torch.device(model_runner.device)):
        return None
    from . import backends

    return backends.MADE[name]
