# SPDX-License-Identifier: Apache-2.0
"""The lint's report, for people and for scripts."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from capture.config import ALLOWED, SEPARATOR
from capture.findings import Finding
from capture.lint import Report
from capture.rules import RULES

WIDTH = 80


def as_json(report: Report) -> dict[str, Any]:
    """The fields scripts may rely on."""
    return {
        "ok": report.ok,
        "patched": report.patched,
        "findings": [_record(one) for one in report.findings],
        "allowed": [{**_record(one), "reason": entry.reason} for one, entry in report.allowed],
        "stale": [asdict(entry) for entry in report.stale],
        "followed": report.followed,
        "not_followed": report.not_followed,
    }


def render(report: Report, show_allowed: bool = False) -> str:
    """One paragraph a finding: where, what, why it matters, and how the code gets there."""
    lines = []
    for finding in report.findings:
        lines += [*_paragraph(finding), ""]
    if show_allowed:
        for finding, entry in report.allowed:
            lines += [*_paragraph(finding), *_wrapped(f"allowed: {entry.reason}"), ""]
    for entry in report.stale:
        text = SEPARATOR.join((entry.rule, entry.file, entry.function, entry.source))
        lines += [f"{ALLOWED}:{entry.line}: matches nothing; remove it", *_wrapped(text), ""]
    return "\n".join([*lines, *textwrap.wrap(_summary(report), WIDTH)])


def _summary(report: Report) -> str:
    """Counts, and what they were counted on."""
    tree = "patched" if report.patched else "unpatched (nothing is allowed there)"
    parts = [f"{tree}: {len(report.followed)} functions followed", f"{len(report.findings)} findings"]
    if report.patched:
        parts.append(f"{len(report.allowed)} more allowed, with reasons, by {ALLOWED}")
    if report.stale:
        parts.append(f"{len(report.stale)} entries of that list match nothing")
    return ", ".join(parts)


def _paragraph(finding: Finding) -> list[str]:
    first, *calls = finding.path
    lines = [f"{finding.file}:{finding.line}: {finding.rule}", *_wrapped(finding.source)]
    lines += _wrapped(RULES[finding.rule])
    lines += _wrapped(f"{finding.region}: {first.function}, {first.file}:{first.line}")
    for call in calls:
        lines += _wrapped(f"calls {call.function} at {call.file}:{call.line}", "    ")
    return lines


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _record(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "path": [asdict(step) for step in finding.path], "why": RULES[finding.rule]}
