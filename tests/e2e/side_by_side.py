# SPDX-License-Identifier: Apache-2.0
"""Several servers at once on one GPU: one process each, which writes WORK/NAME.json and a log."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PORTS = 200
"""Ports a server may use, from its own on."""


def arguments(doc: str | None, servers: Iterable[str], port: int, *switches: str) -> argparse.Namespace:
    """The command line of a script of servers: target, draft, work, out, port, and serve, which it gives itself.

    Args:
        doc: the script's docstring.
        servers: their names.
        port: first of the ports, where none is given.
        switches: options that the script gives itself, too.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="the MLA target")
    parser.add_argument("--draft", type=Path, required=True, help="its drafter")
    parser.add_argument(
        "--work", type=lambda text: Path(text).resolve(), required=True, help="folder for models, results and logs"
    )
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--serve", choices=sorted(servers), help="run this server only (used by the script itself)")
    for switch in switches:
        parser.add_argument(switch, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is None and args.out is None:
        parser.error("--out is needed")
    return args


def run(script: str, names: Iterable[str], work: Path, options: list[str], port: int, limit_s: float) -> list[str]:
    """Runs `script --serve NAME --work WORK --port PORT [options]` for all names without a result, at the same time.

    Returns:
        The names that have no result after `limit_s` seconds; the tail of their logs is printed.
    """
    work.mkdir(parents=True, exist_ok=True)
    names = list(names)
    running: dict[str, subprocess.Popen[bytes]] = {}
    for i, name in enumerate(names):
        if (work / f"{name}.json").exists():
            continue
        command = [sys.executable, script, "--serve", name, "--work", str(work), "--port", str(port + i * PORTS)]
        with (work / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(command + options, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + limit_s
    for process in running.values():
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
    failed = [name for name in names if not (work / f"{name}.json").exists()]
    for name in failed:
        lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
        print(f"--- {name} wrote no result; the end of its log:", *lines[-25:], sep="\n", flush=True)
    return failed


def save(work: Path, name: str, result: dict[str, Any]) -> None:
    """Writes a server's result whole or not at all."""
    partial = work / f"{name}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(work / f"{name}.json")


def load(work: Path, name: str) -> dict[str, Any] | None:
    """A server's result, None where it has none."""
    path = work / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
