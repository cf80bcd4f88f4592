# SPDX-License-Identifier: Apache-2.0
"""Corpus, tokenizer and prompts: deterministic, disjoint, reversible, readable by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from kit import bpe, corpus, prompts


@pytest.fixture(scope="module")
def files() -> list[corpus.Source]:
    found = [file for file in corpus.sources() if file.path.split("/")[0] in {"asyncio", "json", "email", "logging"}]
    return found or corpus.sources()[:80]


@pytest.fixture(scope="module")
def folder(files: list[corpus.Source], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe.save(bpe.train((file.text for file in files), 600), folder, 4096)
    return folder


def test_corpus_is_ordered_and_split_by_path(files: list[corpus.Source]) -> None:
    every = corpus.sources()
    assert [file.path for file in every] == sorted(file.path for file in every)
    held_out = sum(file.held_out for file in every)
    assert 0.01 * len(every) < held_out < 0.1 * len(every)
    assert corpus.Source("abc.py", "a").held_out == corpus.Source("abc.py", "b").held_out
    assert corpus.digest(files) != corpus.digest(files[1:])


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--corpus"):
        corpus.sources(tmp_path)


def test_tokenizer_is_reversible_and_special_ids_are_fixed(folder: Path, files: list[corpus.Source]) -> None:
    tokenizer = bpe.load(folder)
    assert [tokenizer.token_to_id(name) for name in bpe.SPECIAL] == [0, 1, 2, 3]
    for text in [*(file.text for file in files[:5]), "naïve ☃\r\n\t\0"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_auto_tokenizer_agrees(folder: Path, files: list[corpus.Source]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), bpe.load(folder)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (0, 1, 2, 3)
    for file in files[:5]:
        assert theirs(file.text)["input_ids"] == ours.encode(file.text).ids


def test_too_small_a_corpus_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller"):
        bpe.train(["abc"], 2000)


def test_prompts_are_exact_deterministic_and_held_out(folder: Path) -> None:
    tokenizer, every = bpe.load(folder), corpus.sources()
    made = prompts.make(tokenizer, every, 900, 3)
    assert made == prompts.make(tokenizer, list(reversed(every)), 900, 3)
    assert [len(prompt.input_ids) for prompt in made] == [900] * 3
    assert len({prompt.sha256 for prompt in made}) == 3
    held_out = {file.path for file in every if file.held_out}
    assert held_out.issuperset(name for prompt in made for name in prompt.files)
    assert all(prompt.input_ids[0] == 0 for prompt in made)


def test_more_prompts_than_held_out_files_are_refused(folder: Path, files: list[corpus.Source]) -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        prompts.make(bpe.load(folder), files, 10, 10_000)
