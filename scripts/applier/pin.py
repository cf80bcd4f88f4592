# SPDX-License-Identifier: Apache-2.0
"""pin.toml: one SGLang release, its identity and its dtype contract."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from applier import names
from applier.errors import UsageError
from applier.layout import HOME, Layout
from applier.requirements import readable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATHS = ("eager", "graph")
BLOB = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class DtypeRow:
    """One line of the contract: the tensor `name` of `backend` has `dtype` on this path.

    `site` is where SGLang makes it: "Class.method" or "function" of `file`; `var` is its name there;
    `when` narrows the search to the if-branch whose test holds this text; of `x if test else y` whose test holds
    `unless` only y counts.
    """

    backend: str
    path: str
    name: str
    dtype: str
    file: str
    site: str
    var: str
    when: str | None = None
    unless: str | None = None


@dataclass(frozen=True)
class Pin:
    """A release of SGLang we patch.

    `blobs` maps paths below the package to git blob ids; `without` are the shared overlay's files that it does not get.
    """

    name: str
    tag: str
    commit: str | None
    pypi: str
    requires_python: str
    default: bool
    blobs: dict[str, str]
    dtypes: tuple[DtypeRow, ...]
    folder: Path
    without: tuple[str, ...] = ()


def load_pin(folder: Path) -> Pin:
    """Reads `folder`/pin.toml; UsageError names the field that is missing or wrong."""
    path = folder / "pin.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder.name}: no pin.toml in {folder}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8
        raise UsageError(f"{path}: {error}") from None
    try:
        pin = _table(data["pin"], "[pin]")
        return Pin(
            name=_text(pin, "name"),
            tag=_text(pin, "tag"),
            commit=_text(pin, "commit") if "commit" in pin else None,
            pypi=_text(pin, "pypi"),
            requires_python=_specifier(pin, "requires_python"),
            default=pin.get("default", False) is True,
            blobs=_blobs(_table(data["blobs"], "[blobs]")),
            dtypes=tuple(_row(row) for row in _rows(data.get("dtype", []))),
            folder=folder,
            without=_paths(_table(data.get("overlay", {}), "[overlay]").get("without", [])),
        )
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def load_pins(layout: Layout) -> list[Pin]:
    """Every pin of the checkout, by name."""
    return [load_pin(path.parent) for path in sorted(layout.patches.glob("*/pin.toml"))]


def choose_pin(layout: Layout, name: str | None) -> Pin:
    """The pin of that name, else the default one."""
    pins = load_pins(layout)
    known = ", ".join(pin.name for pin in pins) or "none"
    if name is None:
        defaults = [pin for pin in pins if pin.default] or (pins if len(pins) == 1 else [])
        if len(defaults) != 1:
            raise UsageError(f"no default pin among {known}: say which with --pin")
        return defaults[0]
    for pin in pins:
        if name in (pin.name, pin.tag, pin.pypi):
            return pin
    raise UsageError(f"no pin {name!r}; known: {known}")


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no table")
    return value


def _text(table: dict[str, Any], key: str) -> str:
    if not isinstance(table[key], str):
        raise ValueError(f"{key} is {table[key]!r}, not text")
    return str(table[key])


def _specifier(table: dict[str, Any], key: str) -> str:
    if not readable(text := _text(table, key)):
        raise ValueError(f"{key} is {text!r}, not versions with >=, <=, ==, > or < in front, like '>=3.10,<3.14'")
    return text


def _blobs(table: dict[str, Any]) -> dict[str, str]:
    for path in table:
        if what := names.fault(path):
            raise ValueError(f"[blobs]: {path!r} {what}")
        if path.startswith(f"{HOME}/"):
            raise ValueError(f"[blobs]: {path} lies in {HOME}, which the release does not have")
        if not BLOB.fullmatch(_text(table, path)):
            raise ValueError(f"[blobs]: {path}: {table[path]!r} is no git blob id, 40 hex digits")
    if what := names.clash(table):
        raise ValueError(f"[blobs]: {what}")
    return dict(table)


def _paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
        raise ValueError("[overlay] without is no list of paths")
    return tuple(value)


def _rows(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError("dtype is no [[dtype]] row")
    return [_table(row, "a dtype row") for row in value]


def _row(row: dict[str, Any]) -> DtypeRow:
    result = DtypeRow(
        backend=_text(row, "backend"),
        path=_text(row, "path"),
        name=_text(row, "name"),
        dtype=_text(row, "dtype"),
        file=_text(row, "file"),
        site=_text(row, "site"),
        var=_text(row, "var") if "var" in row else row["name"],
        when=_text(row, "when") if "when" in row else None,
        unless=_text(row, "unless") if "unless" in row else None,
    )
    if result.path not in PATHS:
        raise ValueError(f"dtype row {result.backend} {result.name}: path is {result.path!r}, not one of {PATHS}")
    if what := names.fault(result.file):
        raise ValueError(f"dtype row {result.backend} {result.name}: file {result.file!r} {what}")
    return result
