# SPDX-License-Identifier: Apache-2.0
"""The soak's requests: drawn from a seed that their name spells, so that a run that was cut off draws the same ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Lengths = tuple[tuple[float, int, int], ...]
"""Shares of the prompts, each with its fewest and its most tokens."""

MIXED: Lengths = ((0.72, 16, 1500), (0.2, 1500, 8192), (0.08, 8192, 65536))
LONG: Lengths = ((0.6, 16384, 32768), (0.4, 32768, 65536))
LONGEST = 65536

NEW_TOKENS = (16, 128)
"""Fewest and most."""

DOCUMENTS, SHARED = 6, 0.3
"""Beginnings that prompts share, and the share of prompts that begin with one."""

STOPS = ("\n\n", "return", "self", "):", " = ")
"""Strings that a model of Python sources writes soon."""

STOPPED, STREAMED, GREEDY, LEFT, ABORTED, OPEN_ENDED = 0.15, 0.5, 0.6, 0.05, 0.05, 0.1
"""Shares of the requests: with a stop string; streamed; at temperature 0, the others at 1; whose client goes away in
mid-stream; that are aborted by name; that the model's end of text may end."""


class Ask(NamedTuple):
    """One request to /v1/completions."""

    rid: str
    """Its name: server-wave-client-number."""
    prompt: list[int]
    new_tokens: int
    temperature: float
    stream: bool
    stop: str | None
    leave_after: int | None
    """Chunks after which the client closes the connection."""
    abort_after: int | None
    """Chunks after which it is aborted by name; it goes on reading."""
    open_ended: bool
    """Whether the model's end of text ends it."""

    @property
    def complete(self) -> bool:
        """Whether it is meant to come to its end."""
        return self.leave_after is None and self.abort_after is None

    def body(self, model: str) -> dict[str, object]:
        """What is posted."""
        body: dict[str, object] = {
            "model": model, "prompt": self.prompt, "max_tokens": self.new_tokens, "temperature": self.temperature,
            "stream": self.stream, "ignore_eos": not self.open_ended, "rid": self.rid,
        }  # fmt: skip
        if self.stop is not None:
            body["stop"] = [self.stop]
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body


class Text:
    """Token ids to cut prompts from.

    Args:
        ids: at least twice as many as the longest prompt has.
        bos: what every prompt begins with.
    """

    def __init__(self, ids: Sequence[int], bos: int) -> None:
        self._ids, self._bos = list(ids), bos

    @classmethod
    def held_out(cls, model: Path) -> Text:
        """The standard library's held-out files, one after the other.

        Args:
            model: folder with the tokenizer.

        Raises:
            ValueError: they are too short.
        """
        from kit import bpe, corpus

        tokenizer = bpe.load(model)
        files = [file for file in corpus.sources(None) if file.held_out]
        ids = [token for file in files for token in tokenizer.encode(file.text).ids]
        if len(ids) < 2 * LONGEST:
            raise ValueError(f"{len(ids)} held-out tokens, {2 * LONGEST} are needed: take another Python's library")
        return cls(ids, tokenizer.token_to_id(bpe.BOS))

    def cut(self, chosen: random.Random, length: int) -> list[int]:
        """So many tokens from anywhere."""
        first = chosen.randrange(len(self._ids) - length)
        return self._ids[first : first + length]

    def prompt(self, chosen: random.Random, length: int) -> list[int]:
        """A prompt of exactly that many tokens; some begin as others do."""
        if chosen.random() < SHARED:
            document = random.Random(f"document {chosen.randrange(DOCUMENTS)}")
            beginning = self.cut(document, LONGEST)[: length // 2]
        else:
            beginning = []
        return [self._bos, *beginning, *self.cut(chosen, length)][:length]


def length(chosen: random.Random, lengths: Lengths) -> int:
    """Of a prompt; uniform in its logarithm within each share."""
    ((_, least, most),) = chosen.choices(lengths, [share for share, _, _ in lengths])
    return round(math.exp(chosen.uniform(math.log(least), math.log(most))))


def draw(text: Text, lengths: Lengths, rid: str) -> Ask:
    """The request of that name."""
    chosen = random.Random(rid)
    prompt = text.prompt(chosen, length(chosen, lengths))
    stream, ends, fate = chosen.random() < STREAMED, chosen.random(), chosen.random()
    after = chosen.randint(1, 8)
    left = after if fate < LEFT else None
    aborted = after if LEFT <= fate < LEFT + ABORTED else None
    return Ask(
        rid, prompt, chosen.randint(*NEW_TOKENS), 0.0 if chosen.random() < GREEDY else 1.0,
        stream or left is not None or aborted is not None, chosen.choice(STOPS) if ends < STOPPED else None, left,
        aborted, ends > 1 - OPEN_ENDED,
    )  # fmt: skip
