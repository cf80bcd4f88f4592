# SPDX-License-Identifier: Apache-2.0
"""What one pass of a kernel's main loop issues, read off the machine code."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import sass_counts

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)")
MMA_MACS = 16 * 8 * 16
"""Multiply-adds of one mma.sync m16n8k16."""


class Instruction(NamedTuple):
    """One line of a disassembly."""

    address: int
    name: str  # with its modifiers, such as LDSM.16.MT88.4
    operands: str


class Loop(NamedTuple):
    """Instructions of one warp in one pass, whether or not a pass branches around them."""

    mma: int
    all: int
    shared_cycles: int  # 128-byte accesses of shared memory

    def positions(self, warps: int, rows: int, macs_a_pair: int) -> int:
        """KV positions a block gets through in one pass, by its products: a power of two, the rest is padding."""
        return 1 << math.floor(math.log2(self.mma * warps * MMA_MACS / (rows * macs_a_pair)))


def disassemble(library: Path, arch: str, kernel: str) -> str:
    """cuobjdump's listing of one kernel.

    Raises:
        ValueError: the library has no such kernel for `arch`.
    """
    command = [sass_counts.cuobjdump(), "--dump-sass", "--gpu-architecture", f"sm_{arch}", "-fun", kernel, str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if f"Function : {kernel}" not in text:
        raise ValueError(f"{library} holds no {kernel} for sm_{arch}: build it with `apply.py build --arch {arch}`")
    return text


def parse(listing: str) -> Iterator[Instruction]:
    """The instructions of a listing, in order."""
    for line in listing.splitlines():
        if match := LINE.match(line):
            yield Instruction(int(match[1], 16), match[2], match[3])


def main_loop(code: Sequence[Instruction]) -> Loop:
    """The innermost loop with the most matrix products.

    Raises:
        ValueError: no loop has any.
    """
    products = [i.address for i in code if i.name.startswith("HMMA")]
    loops = []
    for branch in code:
        found = TARGET.search(branch.operands) if branch.name.startswith("BRA") else None
        if found and (start := int(found[1], 16)) < branch.address:
            inside = sum(start <= address <= branch.address for address in products)
            loops.append((inside, start - branch.address, start, branch.address))
    if not loops or max(loops)[0] == 0:
        raise ValueError("no loop with matrix products in this code")
    _, _, start, end = max(loops)
    body = [i for i in code if start <= i.address <= end]
    return Loop(sum(i.name.startswith("HMMA") for i in body), len(body), sum(map(_shared_cycles, body)))


def _shared_cycles(i: Instruction) -> int:
    """Passes over the 32 banks: four bytes a lane each; a matrix of LDSM is one."""
    parts = i.name.split(".")
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1] in ("2", "4") else 1
    if parts[0] == "LDGSTS":
        return 4  # 16 bytes a lane
    if parts[0] not in ("LDS", "STS"):
        return 0
    return 4 if "128" in parts else 2 if "64" in parts else 1
