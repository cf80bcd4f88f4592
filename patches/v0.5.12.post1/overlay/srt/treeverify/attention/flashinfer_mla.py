# SPDX-License-Identifier: Apache-2.0
"""TARGET_VERIFY of SGLang's FlashInferMLAAttnBackend, and its fp8 pool: what its patches call.

FlashInfer's plan() and the input's generate_attn_arg_prefill are never called where treeverify serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import gates
from .fp8_pool import attach as attach_fp8
from .fp8_pool import keys, places
from .verifier import Verifier

__all__ = ["attach", "attach_fp8", "keys", "places"]

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

_SUBCLASSES = {
    "FlashMLABackend": "flashmla",
    "CutlassMLABackend": "cutlass_mla",
    "TRTLLMMLABackend": "trtllm_mla",
    "TokenspeedMLABackend": "tokenspeed_mla",
}


def attach(backend: FlashInferMLAAttnBackend, model_runner: ModelRunner, skip_prefill: bool) -> Verifier | None:
    """The verifier of a backend that was just constructed; None where stock code keeps TARGET_VERIFY.

    Raises:
        TreeRefused: a tree is configured and this backend would verify it with the wrong mask.
    """
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    if skip_prefill:
        return None
    name = "flashinfer" if type(backend) is FlashInferMLAAttnBackend else _SUBCLASSES.get(type(backend).__name__, "")
    if not gates.serves(model_runner, name, torch.device(model_runner.device)):
        return None
    return Verifier(model_runner, backend.get_cuda_graph_seq_len_fill_value())
