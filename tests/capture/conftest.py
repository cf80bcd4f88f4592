# SPDX-License-Identifier: Apache-2.0
"""A small sglang package to lint."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture.config import Region
from capture.findings import Finding
from capture.project import Project
from capture.rules import RULES
from capture.walker import Walker


@pytest.fixture
def lint(tmp_path: Path) -> Callable[..., list[Finding]]:
    """Lints modules given by their path below the package, from srt/m.py::step or the entry given."""

    def run(modules: dict[str, str], entry: str = "srt/m.py::step", **region: Any) -> list[Finding]:
        package = tmp_path / "sglang"
        for path, text in {"__init__.py": "", "srt/__init__.py": "", **modules}.items():
            file = package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        here = Region("here", (entry,), frozenset(RULES), **region)
        walker = Walker(Project(package), here, modules)
        assert not walker.known.missing
        walker.enter(entry)
        return sorted(walker.findings.values(), key=lambda one: (one.file, one.line))

    return run
