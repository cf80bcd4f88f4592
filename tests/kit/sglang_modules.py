# SPDX-License-Identifier: Apache-2.0
"""Loads a kit model into SGLang's own modules on the CPU and prints how far they are from the kit's, as JSON.

Run as a process of its own: SGLang keeps its server arguments and process groups in globals.
    python3 sglang_modules.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import socket
import sys
import types
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts"), str(Path(__file__).parents[1] / "support")]

import cpu_sglang  # noqa: E402

cpu_sglang.prepare()
# SGLang's rotary embedding binds vLLM's kernel where there is neither CUDA nor AMX; forward_native never calls it.
for module in ("vllm", "vllm._custom_ops"):
    sys.modules.setdefault(module, types.ModuleType(module))
sys.modules["vllm._custom_ops"].rotary_embedding = None  # type: ignore[attr-defined]

import torch  # noqa: E402
from kit import checkpoint  # noqa: E402
from kit.layers import rope_angles  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM  # noqa: E402
from sglang.srt.models.dflash import DFlashDraftModel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from transformers import AutoConfig  # noqa: E402


def start(folder: Path) -> ModelConfig:
    """A server's globals for one CPU process."""
    arguments = ServerArgs(
        model_path=str(folder / "target"), device="cpu", attention_backend="torch_native", dtype="float32"
    )
    set_global_server_args_for_scheduler(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    init_distributed_environment(1, 0, address, 0, "gloo")
    initialize_model_parallel(1)
    config = ModelConfig.from_server_args(arguments)
    initialize_dp_attention(arguments, config)
    arguments.device = "cuda"  # the plain rotary embedding, not the CPU build's
    return config


def filled(model: Any, weights: Path) -> list[str]:
    """Loads weights through SGLang's loader; the names of parameters it left unset."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(load_file(str(weights)).items())
    model.float()
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def draft_context(folder: Path) -> dict[str, Any]:
    """Features to draft keys and values, as DFlashWorker appends them."""
    theirs = DFlashDraftModel(AutoConfig.from_pretrained(folder / "draft"))
    unset = filled(theirs, folder / "draft" / "model.safetensors")
    ours = checkpoint.load_drafter(folder / "draft")
    features, positions, differences = torch.randn(23, theirs.fc.in_features), torch.arange(5, 28), []
    context = theirs.project_target_hidden(features)
    differences.append(apart(ours.hidden_norm(ours.fc(features)), context))
    for mine, layer in zip(ours.layers, theirs.layers, strict=True):
        attention = layer.self_attn
        k, v = attention.kv_proj_only(context)
        k = attention.apply_k_norm(k)
        _, k = attention.rotary_emb.forward_native(positions, k.clone(), k)
        heads = [part.unflatten(-1, (attention.num_kv_heads, -1)).transpose(0, 1) for part in (k, v)]
        found = mine.self_attn.key_value(context[None], positions[None])
        differences += [apart(a[0], b) for a, b in zip(found, heads, strict=True)]
    return {"unset": unset, "apart": max(differences), "block_size": theirs.block_size}


def target_attention(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """One layer's absorbed attention, with SGLang's projections, norms, rotary embedding, w_kc, w_vc and scaling."""
    model = DeepseekV3ForCausalLM(config.hf_config)
    unset = filled(model, folder / "target" / "model.safetensors")
    mine = checkpoint.load_target(folder / "target")
    c, theirs, positions, x = mine.config, model.model.layers[1].self_attn, torch.arange(9), torch.randn(1, 9, 256)
    sizes = (c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim)
    q, latent, k_pe = theirs.fused_qkv_a_proj_with_mqa(x[0])[0].split(sizes, dim=-1)
    q = theirs.q_b_proj(theirs.q_a_layernorm.forward_native(q))[0].view(9, c.num_attention_heads, -1)
    latent = theirs.kv_a_layernorm.forward_native(latent.contiguous())
    q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
    q_pe, k_pe = theirs.rotary_emb.forward_native(positions, q_pe.contiguous(), k_pe[:, None].contiguous())
    q_latent = torch.bmm(q_nope.transpose(0, 1), theirs.w_kc.float())
    scores = (q_latent @ latent.T + q_pe.transpose(0, 1) @ k_pe[:, 0].T) * theirs.scaling
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.bmm(weights @ latent, theirs.w_vc.float()).transpose(0, 1).flatten(1)
    turn = rope_angles(positions, c.qk_rope_head_dim, c.rope_theta)
    found = mine.model.layers[1].self_attn(x, turn, None, 0)[0]
    return {"unset": unset, "apart": apart(found, theirs.o_proj(out)[0])}


@torch.no_grad()
def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = start(folder)
    print(json.dumps({"target": target_attention(folder, config), "draft": draft_context(folder)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
