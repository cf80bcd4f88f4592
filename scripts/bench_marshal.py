#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what a verify step costs the host: the calls of libtreeverify, and the backends' metadata calls.

    python3 scripts/bench_marshal.py --out results/marshal.json      # on a GPU, with the patched SGLang on the path
    python3 scripts/bench_marshal.py --device cpu --compare --out marshal.json # anywhere: launches are empty functions

What is timed is said in bench/marshal/calls.py (the ways to call) and bench/marshal/step.py (the metadata call of a
replay, before and after, stock's beside it). Without SGLang on the path the calls alone are timed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

from bench.marshal import calls, step  # noqa: E402
from bench.marshal.host import install_empty  # noqa: E402
from bench.marshal.show import table  # noqa: E402

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; writes the report and prints it as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the report, JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: launches are empty functions")
    parser.add_argument("--compare", action="store_true", help="with --device cpu: compile the two C++ ways too")
    parser.add_argument("--calls", type=int, default=2000, help="timed calls a row; default: %(default)s")
    parser.add_argument("--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"), help="recorded in it")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible to PyTorch; --device cpu times all but the launches")
    served = _has_sglang()
    package = _overlay(served)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        rows = list(_rows(package, args, Path(folder), served))
    report = {**_environment(package, args.device), "commit": args.commit, "calls": args.calls, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


def _has_sglang() -> bool:
    """Whether the SGLang on the path is a patched one."""
    found = importlib.util.find_spec("sglang")
    places = found.submodule_search_locations or [] if found else []
    return any((Path(place) / "srt" / "treeverify").is_dir() for place in places)


def _overlay(served: bool) -> str:
    """Name of the overlay's package: SGLang's copy where there is one, for its ops can be defined once."""
    if served:
        importlib.import_module("cpu_sglang").prepare()
        return "sglang.srt.treeverify"
    sys.path.insert(0, str(ROOT / "overlay" / "srt"))
    return "treeverify"


def _rows(package: str, args: argparse.Namespace, folder: Path, served: bool) -> Iterator[Row]:
    for name in ("cases", "packed", "buffers", "paths", "plan"):
        importlib.import_module(f"{package}.attention.{name}")
    attention = importlib.import_module(f"{package}.attention")
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        install_empty(attention, folder)
    compare = args.compare and device.type == "cpu"
    yield from calls.measure(attention, device, args.calls, folder if compare else None)
    if served:
        yield from step.measure(attention, device, args.calls)


def _environment(package: str, device: str) -> Row:
    if device == "cuda":
        found: Row = importlib.import_module(f"{package}.selftest").environment()
        return found
    return {"card": "cpu", "processor": platform.processor() or platform.machine(), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
