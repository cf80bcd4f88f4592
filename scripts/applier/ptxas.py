# SPDX-License-Identifier: Apache-2.0
"""Reading what `ptxas -v` says about each kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for 'sm_(?P<arch>\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel on one architecture; `static_shared` in bytes, `spill` in bytes stored + loaded."""

    kernel: str
    arch: str
    registers: int
    spill: int
    static_shared: int


def parse(log: str) -> Iterator[Usage]:
    """Every kernel in a compiler log, in its order."""
    entry: re.Match[str] | None = None
    spill = 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, spill = match, 0
        elif match := _SPILL.search(line):
            spill = int(match[1]) + int(match[2])
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            static = sum(int(part or 0) for part in shared.groups()) if shared else 0
            yield Usage(entry["name"], entry["arch"], int(match[1]), spill, static)
            entry = None
