# SPDX-License-Identifier: Apache-2.0
"""The form of a results file: where it ran, what ran, rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    """Writes {card, driver, cuda, torch, sglang, flashinfer, commit, command, seed, ok, rows} as JSON to `path`.

    `ok` is whether every row that has an `ok` is so. Needs a GPU and the overlay on the path of sglang.
    """
    from sglang.srt.treeverify.selftest import environment

    ok = all(row.get("ok", True) for row in rows)
    report = {**environment(), "commit": commit(), "ok": ok, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row), flush=True)
    print(f"{path}: {'ok' if ok else 'NOT OK'}", flush=True)


def commit() -> str | None:
    """This repository's commit: $TREEVERIFY_COMMIT where set (a machine without git), else git's."""
    if "TREEVERIFY_COMMIT" in os.environ:
        return os.environ["TREEVERIFY_COMMIT"]
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def fail_unless_ok(path: Path) -> None:
    """Exits with 1 where the report at `path` says that something is wrong."""
    sys.exit(0 if json.loads(path.read_text())["ok"] else 1)
