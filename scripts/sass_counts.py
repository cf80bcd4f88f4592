#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions that matter in the built kernels' machine code.

    python3 scripts/sass_counts.py LIBRARY --arch 120 [--kernel tv_verify_bf16_r40]

Needs cuobjdump: from PATH, the CUDA toolkit, or the `triton` wheel. Prints JSON: per kernel the matrix products of a
warp (HMMA) and of a warpgroup (HGMMA), shared-memory matrix loads (LDSM), asynchronous copies (LDGSTS), e4m3 pairs
widened to fp16 (E4M3), spills (LDL, STL) and all instructions. Counts are of the code, not of a run: the main loop is
rolled, so each of its instructions counts once.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

GROUPS = {"HMMA": "HMMA", "HGMMA": "HGMMA", "LDSM": "LDSM", "LDGSTS": "LDGSTS"}
GROUPS |= {"F2FP.F16.E4M3": "E4M3", "LDL": "spill", "STL": "spill"}
FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.F16\.E4M3)?)")


def cuobjdump() -> str:
    """Path of the disassembler."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    bundled = (
        [Path(p) / "backends" / "nvidia" / "bin" / "cuobjdump" for p in (spec.submodule_search_locations or [])]
        if spec
        else []
    )
    for candidate in [found, "/usr/local/cuda/bin/cuobjdump", *bundled]:
        if candidate and Path(candidate).exists():
            return str(candidate)
    sys.exit("sass_counts: no cuobjdump; install the CUDA toolkit's, or `pip install triton`")


def counts(library: Path, arch: str) -> dict[str, dict[str, int]]:
    """Instruction counts by kernel and group."""
    command = [cuobjdump(), "--dump-sass", "--gpu-architecture", f"sm_{arch}", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows: dict[str, dict[str, int]] = collections.defaultdict(
        lambda: dict.fromkeys([*dict.fromkeys(GROUPS.values()), "all"], 0)
    )
    kernel = ""
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            kernel = match.group(1)
        elif match := INSTRUCTION.match(line):
            rows[kernel]["all"] += 1
            if group := GROUPS.get(match.group(1)):
                rows[kernel][group] += 1
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--arch", required=True, help="like 120 or 90a")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this")
    args = parser.parse_args()
    rows = {name: row for name, row in sorted(counts(args.library, args.arch).items()) if args.kernel in name}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
