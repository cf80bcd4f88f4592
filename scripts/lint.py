#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ruff, mypy and clang-format over the checkout, in build/venv-lint (made once). Exit 1 where one complains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"{sys.argv[0]} needs Python 3.10 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from applier import bootstrap
from applier.errors import UsageError
from applier.kernels import SUFFIXES
from applier.layout import CHECKOUT
from applier.pin import load_pin
from applier.say import note


def main() -> int:
    requirements = (CHECKOUT.root / "tests" / "requirements-lint.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in requirements if line and not line.startswith("#")]
    try:
        python = bootstrap.environment(CHECKOUT.build / "venv-lint", wanted, "the linters")
    except UsageError as error:
        note("\n  ".join([f"error: {error.message}", *error.details]))
        return error.exit_code
    tools = python.parent
    tests = CHECKOUT.root / "tests"
    folders = (CHECKOUT.kernels, tests / "kernels" / "emulator", tests / "apply")
    files = [path for folder in folders for path in sorted(folder.rglob("*"))]
    sources = [path for path in files if path.suffix in (*SUFFIXES, ".cpp")]
    style = f"--style=file:{CHECKOUT.kernels / '.clang-format'}"
    commands: list[list[str | Path]] = [
        [tools / "ruff", "check", "."],
        [tools / "mypy"],
        [tools / "clang-format", "--dry-run", "--Werror", style, *sources],
    ]
    failed = [Path(command[0]).name for command in commands if subprocess.run(command, cwd=CHECKOUT.root).returncode]
    for folder in _overlays():
        env = {**os.environ, "MYPYPATH": str(folder.parent)}
        if subprocess.run([tools / "mypy", folder], cwd=CHECKOUT.root, env=env).returncode:
            failed.append(f"mypy for {folder.parent.name}")
    if failed:
        note(f"lint: {', '.join(failed)} complained")
    return 1 if failed else 0


def _overlays() -> list[Path]:
    """The overlay as each pin has it, with the pin's own files; for mypy, which takes one file a module."""
    folders = []
    for own in sorted(CHECKOUT.patches.glob("*/overlay/srt/treeverify")):
        place = CHECKOUT.build.resolve() / "lint" / own.parents[2].name
        folder = place / "treeverify"
        shutil.rmtree(folder, ignore_errors=True)
        for source in (CHECKOUT.overlay / "srt/treeverify", own):
            shutil.copytree(source, folder, dirs_exist_ok=True)
        for path in load_pin(own.parents[2]).without:
            (place / Path(path).relative_to("srt")).unlink()
        folders.append(folder)
    return folders


if __name__ == "__main__":
    sys.exit(main())
