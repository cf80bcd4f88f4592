# SPDX-License-Identifier: Apache-2.0
"""pin.toml and series as text: what changes is changed, comments and order stay."""

from __future__ import annotations

import re

from applier.settling import MARK

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
    return f"{MARK}{name}"


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


def with_release(text: str, release: dict[str, str | None]) -> str:
    """The text of a pin.toml for another release: its [pin] table anew, its name in the comment at the top."""
    start = re.search(r"^\[pin\][^\n]*\n", text, re.MULTILINE)
    if start is None:
        raise ValueError("no [pin]")
    end = re.compile(r"^(?=[\[#])", re.MULTILINE).search(text, start.end())
    was = re.search(r'^name = "([^"]+)"', text[start.end() :], re.MULTILINE)
    head = text[: start.start()].replace(was[1], str(release["name"])) if was else text[: start.start()]
    table = "".join(f'{key} = "{value}"\n' for key, value in release.items() if value is not None)
    return f"{head}{start[0]}{table}\n{text[end.start() :] if end else ''}"


def with_rows(text: str, rows: list[tuple[str, str]]) -> str:
    """The text with each [[dtype]] row, in order, given (file, what is to settle about it or nothing)."""
    parts = re.split(r"^(?=\[\[dtype\]\])", text, flags=re.MULTILINE)
    if len(parts) != len(rows) + 1:
        raise ValueError(f"{len(parts) - 1} [[dtype]] tables for {len(rows)} rows")
    result = parts[0]
    for part, (file, note) in zip(parts[1:], rows, strict=True):
        part = re.sub(r'^file = "[^"]*"', lambda _, f=file: f'file = "{f}"', part, count=1, flags=re.MULTILINE)
        result += (f"{MARK}{note}\n" if note else "") + part
    return result
