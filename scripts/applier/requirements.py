# SPDX-License-Identifier: Apache-2.0
"""Whether this interpreter has what a requirements list asks for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

_LINE = re.compile(r"^(?P<name>[\w.-]+)(\[[^]]*\])?\s*(?P<specifier>[^;]*?)\s*(;\s*(?P<marker>.*))?$")
_SPECIFIER = re.compile(r"\s*(==|<=|>=|<|>)\s*\d+(\.\d+)*\s*", re.ASCII)
_MARKER = re.compile(r"""python_version\s*(?P<op><|<=|>=|>)\s*["'](?P<version>[\d.]+)["']$""")


def satisfied(lines: Iterable[str]) -> bool:
    """True where every line is met. What can't be read counts as not met: an environment is made then."""
    return all(_met(line.split("#")[0].strip()) for line in lines)


def allows(specifier: str, python: str) -> bool:
    """Whether a requires-python like ">=3.10,<3.14" takes that version of Python, like "3.12" or "3.12.1"."""
    return all(_fits(python, part.replace(" ", "")) for part in specifier.split(","))


def readable(specifier: str) -> bool:
    """Whether `allows` can tell."""
    return all(_SPECIFIER.fullmatch(part) for part in specifier.split(","))


def _met(line: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version  # dear to import, and not needed for a pin

    if not line:
        return True
    match = _LINE.match(line)
    if match is None:
        return False
    if match["marker"]:
        marker = _MARKER.match(match["marker"].strip())
        if marker is None:
            return False
        if not _compare(sys.version_info[:2], marker["op"], _numbers(marker["version"])):
            return True
    try:
        have = version(match["name"])
    except PackageNotFoundError:
        return False
    return all(_fits(have, part.strip()) for part in match["specifier"].split(",") if part.strip())


def _fits(have: str, specifier: str) -> bool:
    if specifier.startswith("=="):
        return have.split("+", maxsplit=1)[0] == specifier[2:]
    match = re.match(r"(<=|>=|<|>)([\d.]+)$", specifier)
    return match is not None and _compare(_numbers(have), match[1], _numbers(match[2]))


def _compare(left: tuple[int, ...], op: str, right: tuple[int, ...]) -> bool:
    return {"<": left < right, "<=": left <= right, ">=": left >= right, ">": left > right}[op]


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"[\d.]*\d", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)
