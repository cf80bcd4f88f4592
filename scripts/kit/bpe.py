# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE, saved so that transformers' AutoTokenizer and SGLang load it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|MASK|>"
SPECIAL = [BOS, EOS, PAD, MASK]  # ids 0 to 3, as the configs say


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges until the vocabulary, specials included, has vocab_size entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, {vocab_size} are asked for: use more text or a "
            "smaller vocabulary"
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path) -> Tokenizer:
    """The tokenizer saved in folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
