# SPDX-License-Identifier: Apache-2.0
"""What is linted: regions of the verify path with their entry points, and the findings that are allowed there.

`capture.toml` of a pin:

    follow = ["srt/..."]        files that calls are followed into, beside the overlay and the patched files
    [assume]                    what holds in a verify step: "test as the source writes it" = true or false
    [types]                     "Class.attribute" = "srt/file.py::Class", where the source does not say
    [concrete]                  "Class" = "srt/file.py::Class", the class that an annotation stands for here
    [[region]]                  name, entries = ["srt/file.py::Class.method"], without = [rules],
                                stop = [functions not to be entered]; assume, types, concrete of its own

`capture-allow.txt`: one finding a line, `rule | file | function | source | reason`; `#` starts a comment.
No line numbers: a finding is what stands there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from applier.errors import UsageError

from capture.rules import RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = "capture.toml"
ALLOWED = "capture-allow.txt"
SEPARATOR = " | "


@dataclass(frozen=True)
class Region:
    """Part of the verify path: where it starts, what holds there, which rules count."""

    name: str
    entries: tuple[str, ...]
    rules: frozenset[str]
    assume: dict[str, bool] = field(default_factory=dict)
    types: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Places of the class, the region's own before the file's; so `concrete`."""
    concrete: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stop: frozenset[str] = frozenset()
    """Functions whose bodies belong to other regions."""


@dataclass(frozen=True)
class Allowed:
    """A finding that stays, and why."""

    rule: str
    file: str
    function: str
    source: str
    reason: str
    line: int
    """In the list."""


@dataclass(frozen=True)
class Config:
    """All of a pin."""

    follow: tuple[str, ...]
    regions: tuple[Region, ...]
    allowed: tuple[Allowed, ...]


def load_config(folder: Path) -> Config:
    """Of a pin's folder. UsageError names the file and what is wrong there."""
    path = folder / CONFIG
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        regions = tuple(_region(data, one) for one in data["region"])
        follow = tuple(data.get("follow", ()))
    except FileNotFoundError:
        raise UsageError(f"{folder.name} has no {CONFIG}; it names where the lint starts ({path})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: a [[region]] needs name and entries ({error})") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return Config(follow, regions, load_allowed(folder / ALLOWED))


def load_allowed(path: Path) -> tuple[Allowed, ...]:
    """The list, empty where there is no file. UsageError for a line that is none."""
    if not path.is_file():
        return ()
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = line.split(SEPARATOR, 3)
        cells = [cell.strip() for cell in [*cells[:3], *(cells[3].rsplit(SEPARATOR, 1) if len(cells) > 3 else [])]]
        if len(cells) != 5 or not all(cells):
            raise UsageError(f"{path}:{number}: expected `rule | file | function | source | reason`")
        rule, file, function, source, reason = cells
        if rule not in RULES:
            raise UsageError(f"{path}:{number}: no rule {rule!r}; there are {', '.join(RULES)}")
        found.append(Allowed(rule, file, function, source, reason, number))
    return tuple(found)


def _region(data: dict[str, Any], one: dict[str, Any]) -> Region:
    without = set(one.get("without", ()))
    if unknown := without - set(RULES):
        raise ValueError(f"region {one['name']}: no rule {', '.join(sorted(unknown))}; there are {', '.join(RULES)}")
    return Region(
        one["name"],
        tuple(one["entries"]),
        frozenset(RULES) - without,
        {**data.get("assume", {}), **one.get("assume", {})},
        _places(one.get("types", {}), data.get("types", {})),
        _places(one.get("concrete", {}), data.get("concrete", {})),
        frozenset(one.get("stop", ())),
    )


def _places(own: dict[str, str], general: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(one[name] for one in (own, general) if name in one) for name in {**general, **own}}
