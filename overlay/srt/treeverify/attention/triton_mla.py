# SPDX-License-Identifier: Apache-2.0
"""TARGET_VERIFY of SGLang's TritonAttnBackend on MLA models: what its patch calls.

The layout is the one treeverify prepares itself, prefix and draft slots in one kv_indices: the draft KV is in the pool
by then, and one launch a step is what it costs (docs/triton-layout.md has the figures). It is int64, as Triton's.
TREEVERIFY_TRITON=0 leaves all to SGLang's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import gates
from .verifier import Verifier

if TYPE_CHECKING:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

    from .buffers import HasPool, VerifyMetadata


def attach(backend: TritonAttnBackend, model_runner: ModelRunner) -> Verifier | None:
    """The verifier of a backend that was just constructed; None where stock code keeps TARGET_VERIFY."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if gates.switched_off(gates.TRITON) or backend.skip_prefill or type(backend) is not TritonAttnBackend:
        return None
    if not gates.serves(model_runner, "triton", torch.device(model_runner.device)):
        return None
    return Verifier(model_runner, backend.get_cuda_graph_seq_len_fill_value(), index=torch.int64)


def attend(
    metadata: VerifyMetadata, q: torch.Tensor, layer: RadixAttention, owner: HasPool, out: torch.Tensor
) -> torch.Tensor:
    """Verify attention of one layer, whose draft KV is in the pool already, divided by the layer's k_scale.

    Args:
        q: [T, H * 576] or [T, H, 576], latent and rope of a head side by side; bf16 or fp16.
        owner: whose token_to_kv_pool holds the KV.
        out: [T, H * 512]; rows past the batch become 0.

    Returns:
        `out`.
    """
    k_scale = 1.0 if layer.k_scale is None else layer.k_scale_float
    return metadata.attend(q, None, layer, owner, out, k_scale)
