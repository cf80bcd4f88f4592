# SPDX-License-Identifier: Apache-2.0
"""The kit's PyTorch models compute what the architectures they are saved as compute."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from kit import checkpoint  # noqa: E402
from kit.target import Target, TargetConfig  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with large random weights, in Hugging Face form."""
    torch.manual_seed(0)
    target = Target(TargetConfig())
    for weight in target.parameters():
        weight.data.mul_(4) if weight.ndim == 2 else weight.data.add_(0.2 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("target")
    checkpoint.save(target, folder)
    return folder


@torch.no_grad()
def test_logits_equal_transformers_deepseek_v3(saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 1024, (2, 300), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    ours, theirs = checkpoint.load_target(saved)(tokens), model(tokens).logits
    assert theirs.abs().max() > 2, "the logits say nothing: the test would pass with any attention"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def test_absorbed_form_equals_expanded_form(saved: Path) -> None:
    target = checkpoint.load_target(saved)
    tokens = torch.randint(0, 1024, (2, 90), generator=torch.Generator().manual_seed(2))
    cache = target.new_cache(2, 96, torch.float32)
    parts = [target.hidden(tokens[:, a:b], cache=cache, start=a)[0] for a, b in ((0, 70), (70, 71), (71, 90))]
    torch.testing.assert_close(torch.cat(parts, dim=1), target.hidden(tokens)[0], atol=1e-4, rtol=0)
    assert cache[0].shape == (2, 96, 576)


@torch.no_grad()
def test_taps_are_layer_outputs(saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 1024, (1, 50), generator=torch.Generator().manual_seed(3))
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    states = model(tokens, output_hidden_states=True).hidden_states
    _, features = checkpoint.load_target(saved).hidden(tokens, taps=(0, 1))
    torch.testing.assert_close(features, torch.cat(states[1:3], dim=-1), atol=1e-4, rtol=0)
