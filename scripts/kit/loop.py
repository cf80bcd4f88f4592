# SPDX-License-Identifier: Apache-2.0
"""One training loop for both models: budget, schedule, best-on-held-out snapshot, checkpoints to resume from."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Budget:
    """Ends a run after `seconds` of training or `steps`, whichever comes first."""

    seconds: float
    steps: int

    def progress(self, seconds: float, steps: int) -> float:
        return min(1.0, max(seconds / self.seconds, steps / self.steps))


@dataclass(frozen=True)
class Recipe:
    """AdamW with warm-up and a cosine to 2 % of the peak rate."""

    peak_rate: float
    warm_up: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: float = 0.05  # of the budget

    def rate(self, progress: float) -> float:
        if progress < self.warm_up:
            return self.peak_rate * max(progress / self.warm_up, 0.01)
        turned = (progress - self.warm_up) / (1 - self.warm_up)
        return self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * turned)))


@dataclass
class Progress:
    """What a checkpoint holds beside weights; `curve` rows are (step, seconds, training loss, held-out loss)."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)


def optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices only, embeddings excepted."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (decayed if weight.ndim == 2 and "embed" not in name else plain).append(weight)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def fit(
    name: str,
    model: nn.Module,
    loss_of: Callable[[int, float], Tensor],
    held_out_loss: Callable[[], float],
    *,
    budget: Budget,
    recipe: Recipe,
    checkpoint: Path,
) -> Progress:
    """Trains model in place and leaves it with the weights that were best on the held-out loss.

    loss_of(step, progress) is the loss of a fresh batch. A run that was broken off goes on from `checkpoint`, its
    earlier seconds counted.
    """
    state, adam = Progress(), optimizer(model, recipe)
    best = copy.deepcopy(model.state_dict())
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=next(model.parameters()).device, weights_only=True)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        best, state = saved["best"], Progress(**saved["state"])
        print(f"{name}: resumed at step {state.step}, {state.seconds:.0f} s", flush=True)
    before, began = state.seconds, time.monotonic()
    progress, recent = budget.progress(state.seconds, state.step), []
    next_look = progress + recipe.evaluate_every
    while progress < 1.0:
        model.train()
        for group in adam.param_groups:
            group["lr"] = recipe.rate(progress)
        loss = loss_of(state.step, progress)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        adam.step()
        recent.append(loss.detach())
        state.step += 1
        if state.step % 8 == 0:
            loss.item()  # waits for the device, so that the clock is honest
        state.seconds = before + time.monotonic() - began
        progress = budget.progress(state.seconds, state.step)
        if progress >= next_look or progress >= 1.0:
            next_look = progress + recipe.evaluate_every
            model.eval()
            held_out, trained = held_out_loss(), torch.stack(recent).mean().item()
            recent.clear()
            state.curve.append((state.step, round(state.seconds, 1), round(trained, 4), round(held_out, 4)))
            print(
                f"{name}: step {state.step}, {state.seconds:.0f} s, loss {trained:.4f}, held out {held_out:.4f}",
                flush=True,
            )
            if held_out < state.best:
                state.best, best = held_out, copy.deepcopy(model.state_dict())
            _save(checkpoint, model=model.state_dict(), adam=adam.state_dict(), best=best, state=asdict(state))
    model.load_state_dict(best)
    model.eval()
    return state


def _save(path: Path, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)
