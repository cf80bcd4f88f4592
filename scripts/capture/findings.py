# SPDX-License-Identifier: Apache-2.0
"""What the lint reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One call on the way to a finding: the function that is entered, and where it is called."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Finding:
    """A rule broken at a place; `path` leads there from an entry."""

    region: str
    rule: str
    file: str
    line: int
    function: str
    source: str
    path: tuple[Step, ...]
