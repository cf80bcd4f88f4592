# SPDX-License-Identifier: Apache-2.0
"""Telling a tree that has the release's files with other line ends: git's core.autocrlf, or an editor."""

from __future__ import annotations

import shlex

from applier.blob import blob_id
from applier.pin import Pin
from applier.tree import Tree


def crlf_note(tree: Tree, pin: Pin) -> str | None:
    """One line where a file is the release's but for CRLF line ends; None where none is."""
    found = [path for path, blob in pin.blobs.items() if _only_line_ends(tree.read(path), blob)]
    if not found:
        return None
    mend = f"pip install --force-reinstall --no-deps sglang=={pin.pypi}"
    if tree.git_root is not None:
        git = f"git -C {shlex.quote(str(tree.git_root))}"
        mend = f"{git} config core.autocrlf false && {git} rm -rq --cached . && {git} reset -q --hard"
    return (
        f"note: {len(found)} of {len(pin.blobs)} files are {pin.name}'s but for their CRLF line ends, and patches go "
        f"in exactly or not at all. Keep edits of yours elsewhere and get the release's line ends: {mend}"
    )


def _only_line_ends(data: bytes | None, blob: str) -> bool:
    return data is not None and b"\r\n" in data and blob_id(data.replace(b"\r\n", b"\n")) == blob
