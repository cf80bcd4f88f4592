#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Judges `apply.py build --json`: fails where a kernel spills or asks for more shared memory than its architecture has.

python3 apply.py build --arch 90a,120 --json > kernels.json && python3 scripts/check_kernels.py kernels.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from applier.arch import shared_limit


def main(path: str) -> int:
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    problems = [] if rows else [f"{path} names no kernel"]
    for row in rows:
        where = f"{row['kernel']} on sm_{row['arch']}"
        if row["spill_bytes"]:
            problems.append(f"{where} spills {row['spill_bytes']} bytes")
        if row["shared_bytes"] > shared_limit(row["arch"]):
            problems.append(
                f"{where} takes {row['shared_bytes']} bytes of shared memory, {shared_limit(row['arch'])} are there"
            )
    print("\n".join(problems) or f"{len(rows)} kernels: no spills, shared memory within limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
