#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Estimates the times of the kernel for sm_120 on an RTX PRO 6000, from its instruction counts and a measured H200.

    python3 scripts/estimate_rtx_pro_6000.py results/h200/verify.json [--out FILE]

Needs no GPU. Prints JSON; every row says `"measured": false`. The model is in scripts/bench/estimate.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench import estimate  # noqa: E402
from bench.gates import finder  # noqa: E402
from bench.shapes import BASELINES  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path, help="a report of bench_verify.py from an H200, with the path `narrow`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = json.loads(args.measured.read_text(encoding="utf-8"))
    find = finder(report["rows"])
    times = {shape: row["us"] for shape in BASELINES if (row := find("narrow", shape))}
    if not times:
        sys.exit(f"estimate_rtx_pro_6000: {args.measured} has no rows of the path `narrow`")
    rows = estimate.rows(times, report["ceilings"])
    text = json.dumps({"what": "estimates, not measurements", "rows": rows}, indent=1) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
