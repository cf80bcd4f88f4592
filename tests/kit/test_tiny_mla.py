# SPDX-License-Identifier: Apache-2.0
"""The committed evidence model: its hashes, size, geometry, and that it is trained."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from kit import acceptance, bpe, checkpoint  # noqa: E402
from kit.decode import generate  # noqa: E402

ROOT = Path(os.environ.get("TREEVERIFY_TINY_MLA", Path(__file__).parents[1] / "data" / "tiny_mla"))
FILES = {
    "target/config.json",
    "target/model.safetensors",
    "target/tokenizer.json",
    "target/tokenizer_config.json",
    "draft/config.json",
    "draft/model.safetensors",
}
# Ours, so no file of the training text; in the style of the library.
SNIPPET = '''
class Counter:
    """Count the lines of a file."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self.count = 0

    def read(self):
        try:
            with open(self.path, encoding=self.encoding) as file:
                for line in file:
                    if not line.strip():
                        continue
                    self.count += 1
        except OSError as exc:
            raise ValueError("cannot read %r" % self.path) from exc
        return self.count

    def __repr__(self):
        return "<%s count=%d>" % (self.__class__.__name__, self.count)
'''

pytestmark = pytest.mark.skipif(
    not (ROOT / "SHA256SUMS").exists(),
    reason="no model: run scripts/train_kit.py on a GPU, put its target/ and draft/ into tests/data/tiny_mla "
    "and there run `sha256sum target/* draft/* > SHA256SUMS`",
)


def config(part: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / part / "config.json").read_text())
    return read


def test_files_are_those_recorded() -> None:
    recorded = dict(reversed(line.split()) for line in (ROOT / "SHA256SUMS").read_text().splitlines())
    assert set(recorded) == FILES
    for name, expected in recorded.items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == expected, name


def test_files_are_small() -> None:
    assert sum((ROOT / name).stat().st_size for name in FILES) <= 16 * 2**20


def test_geometry_is_k2s() -> None:
    target, draft = config("target"), config("draft")
    assert target["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (target["kv_lora_rank"], target["qk_rope_head_dim"], target["num_attention_heads"]) == (512, 64, 8)
    assert target["first_k_dense_replace"] == target["num_hidden_layers"] == draft["num_target_layers"]
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["hidden_size"] == target["hidden_size"] and draft["vocab_size"] == target["vocab_size"]
    assert draft["block_size"] == 8
    assert bpe.load(ROOT / "target").token_to_id(bpe.MASK) == draft["dflash_config"]["mask_token_id"]


@torch.no_grad()
def test_target_knows_python() -> None:
    target = checkpoint.load_target(ROOT / "target")
    tokens = torch.tensor([[0, *bpe.load(ROOT / "target").encode(SNIPPET).ids]])
    logits = target(tokens[:, :-1])
    nats = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
    assert nats < 2.6, f"{nats:.2f} nats a token; guessing has 6.93"


@torch.no_grad()
def test_greedy_text_does_not_collapse() -> None:
    # Two tokens in alternation, as random weights give, would pass any mask.
    target, tokenizer = checkpoint.load_target(ROOT / "target"), bpe.load(ROOT / "target")
    prompt = torch.tensor([[0, *tokenizer.encode(SNIPPET + "\n    def write(self, ").ids]])
    written = generate(target, prompt, 48)[0, prompt.shape[1] :].tolist()
    assert len(set(written)) >= 8, tokenizer.decode(written)


@torch.no_grad()
def test_context_changes_the_next_token() -> None:
    # A target that ignored its prefix could not tell a right mask from a wrong one.
    target, tokenizer = checkpoint.load_target(ROOT / "target"), bpe.load(ROOT / "target")
    tokens = torch.tensor([[0, *tokenizer.encode(SNIPPET).ids]])
    full = target(tokens)[0].argmax(-1)
    cut = torch.stack([target(tokens[:, max(0, i - 3) : i + 1])[0, -1].argmax() for i in range(3, tokens.shape[1])])
    assert (full[3:] != cut).double().mean() > 0.1


@torch.no_grad()
def test_drafter_is_accepted() -> None:
    target, drafter = checkpoint.load_target(ROOT / "target"), checkpoint.load_drafter(ROOT / "draft")
    prompt = torch.tensor([[0, *bpe.load(ROOT / "target").encode(SNIPPET).ids]])
    text = generate(target, prompt, 128)
    found = acceptance.walk(acceptance.matches(target, drafter, text, prompt.shape[1]))
    assert found.tokens_per_step > 1.5, found
