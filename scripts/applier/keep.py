# SPDX-License-Identifier: Apache-2.0
"""Copies of what a user edited, put aside by name before --force takes it out of a tree."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from applier.layout import CHECKOUT
from applier.say import note
from applier.tree import Tree


def put_aside(tree: Tree, paths: Iterable[str]) -> Path | None:
    """Copies these files of the tree to build/edits-<n>, a folder that was not there; gives it, None without files.

    OSError where that fails; nothing may be overwritten then.
    """
    contents = {path: data for path in paths if (data := tree.read(path)) is not None}
    if not contents:
        return None
    folder = _new_folder()
    for path, data in contents.items():
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
    note(f"your edits are kept in {folder}")
    return folder


def _new_folder() -> Path:
    CHECKOUT.build.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = CHECKOUT.build / f"edits-{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # also where another run took it just now
            number += 1
        else:
            return folder
