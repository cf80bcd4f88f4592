# SPDX-License-Identifier: Apache-2.0
"""Target and drafter in Hugging Face form: config.json and model.safetensors, bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kit.drafter import Drafter, DrafterConfig
from kit.target import Target, TargetConfig

Model = TypeVar("Model", bound=nn.Module)


def save(model: Target | Drafter, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16) into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1) + "\n")


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    """The target saved in folder, weights cast to dtype, in eval mode on the CPU."""
    config = _config(folder)
    fields = TargetConfig.__dataclass_fields__
    model = Target(TargetConfig(**{name: value for name, value in config.items() if name in fields}))
    return _filled(model, folder, dtype)


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter saved in folder, weights cast to dtype, in eval mode on the CPU."""
    config = _config(folder)
    config |= config.pop("dflash_config")
    config["target_layer_ids"] = tuple(config["target_layer_ids"])
    fields = DrafterConfig.__dataclass_fields__
    model = Drafter(DrafterConfig(**{name: value for name, value in config.items() if name in fields}))
    return _filled(model, folder, dtype)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _filled(model: Model, folder: Path, dtype: torch.dtype) -> Model:
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    return model.to(dtype).eval()
