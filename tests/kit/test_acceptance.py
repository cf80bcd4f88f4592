# SPDX-License-Identifier: Apache-2.0
"""The acceptance computed from finished text against speculation carried out step by step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kit import acceptance  # noqa: E402
from kit.decode import generate  # noqa: E402
from kit.drafter import Drafter, DrafterConfig  # noqa: E402
from kit.target import Target, TargetConfig  # noqa: E402

SMALL = TargetConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_attention_heads=2)


@pytest.fixture(scope="module")
def models() -> tuple[Target, Drafter]:
    """A target that tends to repeat a token and a drafter that half knows it: some blocks are accepted, some not."""
    torch.manual_seed(0)
    target = Target(SMALL).eval()
    drafter = Drafter(DrafterConfig(vocab_size=32, hidden_size=64, intermediate_size=64)).eval()
    for weight in (*target.parameters(), *drafter.parameters()):
        if weight.ndim == 2:
            weight.data.mul_(4)
    target.lm_head.weight.data.add_(target.model.embed_tokens.weight)
    return target, drafter


@torch.no_grad()
def speculate(target: Target, drafter: Drafter, prompt: torch.Tensor, length: int) -> list[int]:
    """Tokens committed by each step, decoding prompt to length with one forward pass of the target a step."""
    tokens = torch.cat((prompt, target(prompt)[:, -1:].argmax(-1)), dim=1)
    steps = []
    while tokens.shape[1] <= length - drafter.config.block_size + 1:
        _, features = target.hidden(tokens[:, :-1], taps=drafter.config.target_layer_ids)
        anchor = torch.tensor([[tokens.shape[1] - 1]])
        block = drafter(features, anchor, tokens[:, -1:], target.model.embed_tokens)
        drafted = target.lm_head(block[:, 0, 1:]).argmax(-1)
        verified = target(torch.cat((tokens, drafted), dim=1))[:, tokens.shape[1] - 1 :].argmax(-1)
        accepted = int((drafted == verified[:, :-1]).long().cumprod(-1).sum())
        tokens = torch.cat((tokens, verified[:, : accepted + 1]), dim=1)
        steps.append(accepted + 1)
    return steps


@torch.no_grad()
def test_walk_is_the_speculative_run(models: tuple[Target, Drafter]) -> None:
    target, drafter = models
    prompts = torch.randint(0, 32, (4, 10), generator=torch.Generator().manual_seed(1))
    text = generate(target, prompts, 60)
    hits = acceptance.matches(target, drafter, text, start=10, chunk=7)
    found = [acceptance.walk(row[None]) for row in hits]
    expected = [speculate(target, drafter, prompt[None], 70) for prompt in prompts]
    assert [(a.steps, round(a.tokens_per_step * a.steps)) for a in found] == [(len(s), sum(s)) for s in expected]
    assert {1} < {n for steps in expected for n in steps}, "every step alike: the test would see no error"


def test_walk_by_hand() -> None:
    hits = torch.tensor([[[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0]]], dtype=torch.bool)
    result = acceptance.walk(hits)  # steps at 0 (1 accepted), 2 (none), 3 (2 accepted)
    assert (result.steps, result.tokens_per_step) == (3, 2.0)
    assert result.position_accuracy == [0.75, 0.75, 0.75]
