# SPDX-License-Identifier: Apache-2.0
"""Finding a file that has another name in another release."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from applier.patchset import decode
from applier.tree import Tree

DISTINCT = 20  # characters of a line that tells files apart
FOLLOW = 0.5  # share of a file's lines from which another file is taken for it, as git does
MENTION = 0.15


@dataclass(frozen=True)
class Moved:
    """The file that has most of the lines of `path`, and their share."""

    path: str
    now: str
    share: float

    @property
    def followed(self) -> bool:
        return self.share >= FOLLOW

    def __str__(self) -> str:
        return f"{self.path} is gone; {self.now} has {self.share:.0%} of its lines"


def find_moved(tree: Tree, gone: Mapping[str, bytes], known: Collection[str]) -> dict[str, Moved]:
    """For each file that is gone, given with its old content, the one that took it over; none where nothing is like it.

    No file is taken for two, and none of `known`, which have the same name in both releases.
    """
    wanted = {path: _lines(data) for path, data in gone.items()}
    best: dict[str, Moved] = {}
    if not wanted:
        return best
    for file in sorted(tree.path("srt").rglob("*.py")):
        now = file.relative_to(tree.package).as_posix()
        if now in known or not file.is_file():
            continue
        have = _lines(file.read_bytes())
        for path, lines in wanted.items():
            share = len(lines & have) / max(1, len(lines))
            if share >= MENTION and (path not in best or share > best[path].share):
                best[path] = Moved(path, now, share)
    return {path: found for path, found in best.items() if _first(found, best)}


def _first(found: Moved, among: Mapping[str, Moved]) -> bool:
    """Whether no other file that is gone has a better claim to the same new one."""
    rivals = [other for other in among.values() if other.now == found.now]
    return max(rivals, key=lambda other: other.share) is found


def _lines(data: bytes) -> set[str]:
    stripped = (line.strip() for line in decode(data).split("\n"))
    return {line for line in stripped if len(line) >= DISTINCT}
