# SPDX-License-Identifier: Apache-2.0
"""What is to be measured, and how its rows are told apart."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..store import Row, Store
from .acceptance import TEMPERATURES
from .modes import Mode
from .speed import Cell

KEY = ("stage", "mode", "n", "temperature", "context", "bs", "round", "draft_backend", "card", "build")
"""Fields that tell a measurement; those that a stage lacks are None."""

STAGES = ("acceptance", "speed")


def comparable(row: Row) -> bool:
    """Whether other rows can be set against this one: earlier versions of this bench knew no rounds."""
    return row["stage"] != "speed" or "round" in row


class Server(NamedTuple):
    """One engine and what it is measured for."""

    stage: str
    mode: Mode
    draft_backend: str
    card: str
    build: str

    def wanted(self, store: Store) -> Iterator[tuple[Row, float]]:
        """Of the stage `acceptance`: labels of the measurements that the store lacks, each with its temperature."""
        for temperature in TEMPERATURES:
            if not store.done(label := self._label({"temperature": temperature})):
                yield label, temperature

    def label(self, cell: Cell, round: int) -> Row:
        """KEY's fields of a run of the stage `speed`."""
        return self._label({**cell._asdict(), "round": round})

    def _label(self, where: Row) -> Row:
        backend = self.draft_backend if self.mode.speculates else None
        return {"stage": self.stage, "mode": self.mode.algorithm, "n": self.mode.width, **where,
                "draft_backend": backend, "card": self.card, "build": self.build}  # fmt: skip


def build(mode: Mode) -> str:
    """Tells one build of the served code from another: SGLang's version, and what treeverify put into it.

    Raises:
        ModuleNotFoundError: no SGLang.
    """
    version = f"sglang {importlib.metadata.version('sglang')}"
    found = importlib.util.find_spec("sglang")
    if not mode.speculates or found is None or not found.submodule_search_locations:
        return version
    return f"{version} {digest(Path(found.submodule_search_locations[0]) / 'srt' / 'treeverify')}"


def digest(folder: Path) -> str:
    """Head of the SHA-256 of the sources and libraries in a folder, in order of their paths."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
