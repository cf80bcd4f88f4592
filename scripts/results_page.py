#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes one Markdown page of the reports in a folder: their tables, goals and pictures.

    python3 scripts/results_page.py results/h200                # results/h200/page.md
    python3 scripts/results_page.py results/h200 --draw         # the pictures again too; needs matplotlib
    python3 scripts/results_page.py results/h200 --check        # exit 1 where the page is not what the reports say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench import page  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 1 where there is no report, or the page is another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with reports, at any depth")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--draw", action="store_true", help="draw the pictures again, where matplotlib is")
    what.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    path = args.folder / "page.md"
    try:
        text = page.text(args.folder, args.draw)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if args.check:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return 0
        print(f"{path} is not made of these reports: run scripts/results_page.py {args.folder}", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
