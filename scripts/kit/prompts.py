# SPDX-License-Identifier: Apache-2.0
"""Deterministic prompts of given token lengths, cut from the held-out files of the standard library.

python3 scripts/make_prompts.py --model tests/data/tiny_mla/target --length 300 --length 2000 --count 4
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kit import bpe, corpus


@dataclass(frozen=True)
class Prompt:
    """Token ids to send as input_ids, the files they come from, and SHA-256 of the ids, space-separated."""

    input_ids: list[int]
    files: list[str]
    sha256: str


def make(tokenizer: Tokenizer, files: list[corpus.Source], length: int, count: int) -> list[Prompt]:
    """count prompts of exactly length tokens; each begins with <|bos|> and at another held-out file.

    Short files are followed by the next ones, as in training. Raises ValueError where the held-out files are too few.
    """
    held_out = [file for file in files if file.held_out]
    if count > len(held_out):
        raise ValueError(f"{count} prompts asked for, the corpus holds out {len(held_out)} files: ask for fewer")
    bos, eos = tokenizer.token_to_id(bpe.BOS), tokenizer.token_to_id(bpe.EOS)
    order = sorted(held_out, key=lambda file: hashlib.sha256(file.path.encode()).hexdigest())
    prompts = []
    for first in range(count):
        ids: list[int] = []
        used: list[str] = []
        for file in itertools.islice(itertools.cycle(order), first, first + len(order)):
            if len(ids) >= length:
                break
            ids += [bos, *tokenizer.encode(file.text).ids, eos]
            used.append(file.path)
        if len(ids) < length:
            raise ValueError(f"the held-out files have only {len(ids)} tokens, {length} are asked for")
        ids = ids[:length]
        prompts.append(Prompt(ids, used, hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()))
    return prompts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--length", type=int, action="append", required=True, help="tokens a prompt; repeatable")
    parser.add_argument("--count", type=int, default=1, help="prompts of each length")
    parser.add_argument("--corpus", type=Path, help="folder of sources (default: the standard library)")
    options = parser.parse_args(arguments)
    tokenizer, files = bpe.load(options.model), corpus.sources(options.corpus)
    for length in options.length:
        for prompt in make(tokenizer, files, length, options.count):
            print(json.dumps(asdict(prompt)))
    return 0
