# SPDX-License-Identifier: Apache-2.0
"""The training script end to end, small, on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from kit import checkpoint, corpus, train  # noqa: E402

Trained = tuple[Path, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few packages of the standard library."""
    folder = tmp_path_factory.mktemp("library")
    for name in ("asyncio", "json", "email", "http"):
        shutil.copytree(corpus.standard_library() / name, folder / name)
    return folder


def run(out: Path, work: Path, library: Path, steps: int) -> dict[str, Any]:
    places = ["--out", str(out), "--work", str(work), "--corpus", str(library)]
    train.main([*places, "--steps", str(steps), "--minutes", "60", "--small", "--device", "cpu"])
    report: dict[str, Any] = json.loads((out / "train.json").read_text())
    return report


@pytest.fixture(scope="module")
def trained(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out, work = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("work")
    return out, work, run(out, work, library, 24)


def test_both_losses_fall(trained: Trained) -> None:
    for name, at_most in (("target", 6.4), ("drafter", 6.4)):
        curve = trained[2]["runs"][name]["curve"]
        assert curve[-1][0] == 24
        assert curve[-1][2] < curve[0][2], f"{name}: training loss {curve[0][2]} -> {curve[-1][2]}"
        assert trained[2]["runs"][name]["best"] < at_most, f"{name}: no better than guessing (6.93 nats)"


def test_everything_is_written_and_hashed(trained: Trained) -> None:
    out, _, report = trained
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {*report["files"], "train.json"} and len(files) == 7
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) <= 16 * 2**20
    assert checkpoint.load_drafter(out / "draft").config.target_layer_ids == (0, 1)


@torch.no_grad()
def test_transformers_reads_the_target(trained: Trained) -> None:
    transformers = pytest.importorskip("transformers")
    folder = trained[0] / "target"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([tokenizer("def run(self):\n    return self.loop")["input_ids"]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(checkpoint.load_target(folder)(tokens), theirs, atol=1e-3, rtol=0)


def test_a_finished_run_is_not_trained_again(trained: Trained, library: Path, tmp_path: Path) -> None:
    _, work, report = trained
    again = run(tmp_path, work, library, 24)
    assert again["files"] == report["files"]
    assert again["runs"] == report["runs"]


def test_a_longer_run_goes_on_from_the_checkpoint(trained: Trained, library: Path, tmp_path: Path) -> None:
    _, work, report = trained
    shutil.copytree(work, tmp_path / "work")
    longer = run(tmp_path / "out", tmp_path / "work", library, 26)
    curve = longer["runs"]["target"]["curve"]
    assert curve[: len(report["runs"]["target"]["curve"])] == report["runs"]["target"]["curve"]
    assert curve[-1][0] == 26
