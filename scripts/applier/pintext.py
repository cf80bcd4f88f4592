# SPDX-License-Identifier: Apache-2.0
"""pin.toml and series as text: what changes is changed, comments and order stay."""

from __future__ import annotations

import re

BLOB = re.compile(r'\s*"([^"]+)"\s*=\s*"[0-9a-f]*"')
TABLE = re.compile(r"^\s*\[", re.MULTILINE)


def with_blobs(text: str, blobs: dict[str, str]) -> str:
    """The text of a pin.toml with exactly these blob ids."""
    start = re.search(r"^\[blobs\][^\n]*\n", text, re.MULTILINE)
    if start is None:
        raise ValueError("no [blobs]")
    end = TABLE.search(text, start.end())
    body = text[start.end() : end.start() if end else len(text)]
    left = dict(blobs)
    lines = []
    for line in body.splitlines(keepends=True):
        match = BLOB.match(line)
        if match is None:
            lines.append(line)
        elif match[1] in left:
            blob = left.pop(match[1])
            lines.append(line if f'"{blob}"' in line else _line(match[1], blob))
    for path, blob in sorted(left.items()):
        named = [(i, match[1]) for i, line in enumerate(lines) if (match := BLOB.match(line))]
        at = next((i for i, name in named if name > path), named[-1][0] + 1 if named else 0)
        lines.insert(at, _line(path, blob))
    return text[: start.end()] + "".join(lines) + (text[end.start() :] if end else "")


def without(series: str, name: str) -> str:
    """The series without a patch."""
    return "".join(line for line in series.splitlines(keepends=True) if line.split("#")[0].strip() != name)


def waiting(name: str) -> str:
    """The line that keeps the place of a patch that is to be settled yet."""
    return f"# to settle: {name}"


def settled(series: str, name: str) -> str:
    """The series with a patch in the place kept for it, at the end where there is none."""
    lines = series.splitlines()
    if waiting(name) in lines:
        lines[lines.index(waiting(name))] = name
    else:
        lines.append(name)
    return "\n".join(lines) + "\n"


def _line(path: str, blob: str) -> str:
    return f'"{path}" = "{blob}"\n'
