# SPDX-License-Identifier: Apache-2.0
"""The drafter against an independent build of it from transformers' Qwen3, whose layers DFlash uses."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from kit import checkpoint  # noqa: E402
from kit.drafter import Drafter, DrafterConfig, block_mask  # noqa: E402

NAMES_IN_A_LAYER = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig())
    for weight in drafter.parameters():
        weight.data.mul_(3) if weight.ndim == 2 else weight.data.add_(0.2 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("draft")
    checkpoint.save(drafter, folder)
    return folder


def inputs(rows: int, context: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.nn.Embedding]:
    """Features, anchors, anchor tokens and an embedding."""
    pick = torch.Generator().manual_seed(1)
    embedding = torch.nn.Embedding(1024, 256)
    torch.nn.init.normal_(embedding.weight, generator=pick)
    features = torch.randn(rows, context, 512, generator=pick)
    anchors = torch.randint(1, context + 1, (rows, blocks), generator=pick)
    return features, anchors, torch.randint(4, 1024, (rows, blocks), generator=pick), embedding


def test_names_are_those_the_server_loads() -> None:
    # SGLang's loader skips names it does not know without a word, so a wrong name would be a random weight.
    drafter = Drafter(DrafterConfig())
    layers = {f"layers.{i}.{name}.weight" for i in range(2) for name in NAMES_IN_A_LAYER}
    assert set(drafter.state_dict()) == layers | {"norm.weight", "fc.weight", "hidden_norm.weight"}


@torch.no_grad()
def test_block_equals_qwen3_layers_over_projected_context(saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    drafter = checkpoint.load_drafter(saved)
    features, anchors, first, embedding = inputs(1, 40, 1)
    anchor = int(anchors[0, 0])
    ours = drafter(features, anchors, first, embedding)[0, 0]

    model = transformers.Qwen3Model(transformers.AutoConfig.from_pretrained(saved, attn_implementation="eager"))
    missing = model.load_state_dict(drafter.state_dict(), strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert sorted(missing.unexpected_keys) == ["fc.weight", "hidden_norm.weight"]
    model.eval()
    context = drafter.hidden_norm(drafter.fc(features[:, :anchor]))
    rotary = model.rotary_emb(context, torch.arange(anchor)[None])
    cache = transformers.DynamicCache(config=model.config)
    turn = transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb
    for i, layer in enumerate(model.layers):
        split = (1, anchor, 2, 128)
        k = layer.self_attn.k_norm(layer.self_attn.k_proj(context).view(split)).transpose(1, 2)
        v = layer.self_attn.v_proj(context).view(split).transpose(1, 2)
        cache.update(turn(k, k, *rotary)[1], v, i)
    tokens = torch.tensor([[int(first), *[3] * 7]])
    theirs = model(
        inputs_embeds=embedding(tokens),
        position_ids=torch.arange(anchor, anchor + 8)[None],
        past_key_values=cache,
        attention_mask={"full_attention": torch.zeros(1, 1, 8, anchor + 8)},  # nothing hidden: not causal
    ).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def test_blocks_do_not_see_each_other_nor_later_context(saved: Path) -> None:
    drafter = checkpoint.load_drafter(saved)
    features, anchors, first, embedding = inputs(2, 30, 5)
    together = drafter(features, anchors, first, embedding)
    for row in range(2):
        for i in range(5):
            one = slice(i, i + 1)
            cut = features[row : row + 1, : int(anchors[row, i])]
            alone = drafter(cut, anchors[row : row + 1, one], first[row : row + 1, one], embedding)
            torch.testing.assert_close(alone[0, 0], together[row, i], atol=1e-4, rtol=0)


def test_block_mask_by_hand() -> None:
    visible = block_mask(torch.tensor([[0, 2]]), context=3, block=2)[0, 0]
    first, second = [0, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 1]
    assert visible.int().tolist() == [first, first, second, second]


def test_last_layer_cannot_be_tapped() -> None:
    with pytest.raises(ValueError, match="never captured"):
        DrafterConfig(target_layer_ids=(0, 2))
