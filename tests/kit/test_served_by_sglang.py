# SPDX-License-Identifier: Apache-2.0
"""SGLang's own loaders take every tensor the kit writes, and its modules compute the same."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kit import checkpoint  # noqa: E402
from kit.drafter import Drafter, DrafterConfig  # noqa: E402
from kit.target import Target, TargetConfig  # noqa: E402

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    for part, model in (("target", Target(TargetConfig())), ("draft", Drafter(DrafterConfig()))):
        for weight in model.parameters():
            weight.data.mul_(3) if weight.ndim == 2 else weight.data.add_(0.2 * torch.randn_like(weight))
        checkpoint.save(model, folder / part)
    child = [sys.executable, str(Path(__file__).with_name("sglang_modules.py")), str(folder)]
    done = subprocess.run(child, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("part", ["target", "draft"])
def test_no_parameter_is_left_unset(report: dict[str, Any], part: str) -> None:
    assert report[part]["unset"] == []


@pytest.mark.parametrize("part", ["target", "draft"])
def test_modules_compute_the_same(report: dict[str, Any], part: str) -> None:
    assert report[part]["apart"] < 1e-5


def test_block_size_is_read_from_the_config(report: dict[str, Any]) -> None:
    assert report["draft"]["block_size"] == DrafterConfig().block_size
