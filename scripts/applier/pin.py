# SPDX-License-Identifier: Apache-2.0
"""pin.toml: one SGLang release, its identity and its dtype contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from applier.errors import UsageError
from applier.layout import Layout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATHS = ("eager", "graph")


@dataclass(frozen=True)
class DtypeRow:
    """One line of the contract: the tensor `name` of `backend` has `dtype` on this path.

    `site` is where SGLang makes it: "Class.method" or "function" of `file`; `var` is its name there;
    `when` narrows the search to the if-branch whose test holds this text.
    """

    backend: str
    path: str
    name: str
    dtype: str
    file: str
    site: str
    var: str
    when: str | None = None


@dataclass(frozen=True)
class Pin:
    """A release of SGLang we patch. `blobs` maps paths below the package to git blob ids."""

    name: str
    tag: str
    commit: str | None
    pypi: str
    requires_python: str
    default: bool
    blobs: dict[str, str]
    dtypes: tuple[DtypeRow, ...]
    folder: Path


def load_pin(folder: Path) -> Pin:
    """Reads `folder`/pin.toml; UsageError names the field that is missing or wrong."""
    path = folder / "pin.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder.name}: no pin.toml in {folder}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        pin = data["pin"]
        return Pin(
            name=pin["name"],
            tag=pin["tag"],
            commit=pin.get("commit"),
            pypi=pin["pypi"],
            requires_python=pin["requires_python"],
            default=pin.get("default", False),
            blobs=dict(data["blobs"]),
            dtypes=tuple(_row(path, row) for row in data.get("dtype", [])),
            folder=folder,
        )
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing") from None


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


def _row(path: Path, row: dict[str, Any]) -> DtypeRow:
    result = DtypeRow(
        backend=row["backend"],
        path=row["path"],
        name=row["name"],
        dtype=row["dtype"],
        file=row["file"],
        site=row["site"],
        var=row.get("var", row["name"]),
        when=row.get("when"),
    )
    if result.path not in PATHS:
        raise UsageError(
            f"{path}: dtype row {result.backend} {result.name}: path is {result.path!r}, not one of {PATHS}"
        )
    return result
