#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Estimates the portable path's times on an RTX PRO 6000 from its machine code and a measured H200.

    python3 scripts/estimate_rtx_pro_6000.py LIBRARY --measured results/h200/verify.json [--out FILE]

LIBRARY holds code for sm_120 and sm_90a. Needs no GPU; needs cuobjdump, as scripts/sass_counts.py. Prints JSON; every
row says `"measured": false`. The model is in scripts/bench/estimate.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench import estimate, sass  # noqa: E402
from bench.shapes import Shape  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--measured", type=Path, required=True, help="a report of bench_verify.py from an H200")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = json.loads(args.measured.read_text(encoding="utf-8"))
    narrow = any(row["impl"] == "narrow" for row in report["rows"])  # a Hopper card, beside its wide shapes
    times = {Shape(row["bs"], row["heads"], row["n"], row["kv"]): row["us"] for row in report["rows"]
             if row["impl"] == ("narrow" if narrow else "portable") and row["slots"] == "random" and row["pool"] is None
             and row["batch"] == "even" and "us" in row}  # fmt: skip

    def loops(arch: str) -> estimate.Loops:
        @functools.cache
        def loop(tile: int) -> sass.Loop:
            return sass.main_loop(list(sass.parse(sass.disassemble(args.library, arch, f"tv_verify_bf16_r{tile}"))))

        return loop

    try:
        rows = estimate.rows(loops("120"), loops("90a"), times, report["ceilings"])
    except ValueError as e:
        sys.exit(f"estimate_rtx_pro_6000: {e}")
    text = json.dumps({"what": "estimates, not measurements", "rows": rows}, indent=1) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
