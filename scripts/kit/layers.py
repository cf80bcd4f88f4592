# SPDX-License-Identifier: Apache-2.0
"""Building blocks shared by the target and the drafter.

The modules carry the names Hugging Face checkpoints use (`gate_proj`, `q_norm`, …), so `state_dict()` is the
checkpoint. Shapes are written [batch, tokens, …]; every tensor is floating point unless a dtype is given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 and rounded once, as SGLang's kernel does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (self.weight * scaled).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_angles(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [*positions.shape, dim / 2], of position * theta^(-2i/dim)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angle = positions.float()[..., None] * theta**-exponent
    return angle.cos(), angle.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[2i], x[2i+1]): DeepSeek's layout, what SGLang calls is_neox_style=False."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + dim/2]): the GPT-NeoX layout of Qwen3 and of the DFlash drafter."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
