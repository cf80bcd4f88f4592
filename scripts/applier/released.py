# SPDX-License-Identifier: Apache-2.0
"""A file as its release has it: from what is at hand, else from the wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

from applier.blob import blob_id
from applier.errors import DriftError
from applier.gitinfo import blob_content
from applier.layout import CHECKOUT, ORIGINALS
from applier.obtain import cached_wheel, fetch_wheel, made_tree
from applier.pin import Pin
from applier.tree import Tree

_wheels: dict[str, Path] = {}  # looked at once a run: it takes a while to see that every member is intact


def released_file(tree: Tree, pin: Pin, path: str, fetch: bool = True) -> bytes | None:
    """`path` as released: from a tree made here, from the tree's own git, from the wheel.

    None where the release has no such file, or isn't at hand and may not be fetched. UsageError where fetching fails,
    DriftError where the wheel is not the pin's release.
    """
    blob = pin.blobs.get(path)
    if blob is not None:
        made = made_tree(CHECKOUT, pin) / "python" / "sglang"
        for candidate in (made / path, made / ORIGINALS / blob, tree.path(f"{ORIGINALS}/{blob}")):
            if candidate.is_file() and blob_id(data := candidate.read_bytes()) == blob:
                return data
        if (found := blob_content(tree, blob)) is not None:
            return found
    wheel = _wheel(pin, fetch)
    if wheel is None:
        return None
    with zipfile.ZipFile(wheel) as archive:
        try:
            data = archive.read(f"sglang/{path}")
        except KeyError:
            return None
    if blob is not None and blob_id(data) != blob:
        raise DriftError(f"{path} of the wheel of sglang {pin.pypi} is not the one in {pin.name}/pin.toml")
    return data


def _wheel(pin: Pin, fetch: bool) -> Path | None:
    if pin.pypi not in _wheels and (found := fetch_wheel(pin) if fetch else cached_wheel(pin)):
        _wheels[pin.pypi] = found
    return _wheels.get(pin.pypi)
