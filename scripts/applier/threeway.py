# SPDX-License-Identifier: Apache-2.0
"""--3way: carrying the patches over to files that are not quite the release's, or refusing whole."""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from pathlib import Path

from applier.blob import blob_id
from applier.bootstrap import provide_command
from applier.errors import DriftError
from applier.gitinfo import blob_content
from applier.layout import CHECKOUT, ORIGINALS
from applier.obtain import fetch_wheel, made_tree
from applier.patchset import apply_patches
from applier.release import Release
from applier.tree import Tree


def merge_patches(tree: Tree, release: Release, base: dict[str, bytes]) -> dict[str, bytes]:
    """Patched content of every touched file: the tree's own changes and the patches' in one.

    The patches are applied to the release's files, and what they change is merged into the tree's. DriftError names the
    hunks that don't fit as they are where a merge has conflicts; no conflict marker is ever written.
    """
    pin = release.pin
    pristine = {
        path: base[path] if blob_id(base[path]) == pin.blobs[path] else _release_file(tree, release, path)
        for path in base
    }
    patched = apply_patches(release.patches, pristine.get)
    merged, conflicts = {}, []
    for path, theirs in patched.items():
        result = theirs if base[path] == pristine[path] else _merge(base[path], pristine[path], theirs)
        if result is None or not _compiles(path, result):
            conflicts.append(path)
        else:
            merged[path] = result
    if conflicts:
        try:
            apply_patches(release.patches, base.get)
        except DriftError as error:
            lines = [line for line in error.details if line.startswith("  ") or any(path in line for path in conflicts)]
            raise DriftError(f"the merge has conflicts in {', '.join(conflicts)}; nothing was changed", lines) from None
        raise DriftError(f"the merge of {', '.join(conflicts)} is no valid Python; nothing was changed")
    return merged


def _release_file(tree: Tree, release: Release, path: str) -> bytes:
    """A file as released: from the tree's own git, from a tree made here, from the wheel."""
    pin, blob = release.pin, release.pin.blobs[path]
    made = made_tree(CHECKOUT, pin) / "python" / "sglang"
    for candidate in (made / path, made / ORIGINALS / blob):
        if candidate.is_file() and blob_id(data := candidate.read_bytes()) == blob:
            return data
    if (found := blob_content(tree, blob)) is not None:
        return found
    with zipfile.ZipFile(fetch_wheel(pin)) as wheel:
        data = wheel.read(f"sglang/{path}")
    if blob_id(data) != blob:
        raise DriftError(f"{path} of the wheel of sglang {pin.pypi} is not the one in {pin.name}/pin.toml")
    return data


def _merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """git's merge of three versions in memory; None where it has conflicts."""
    provide_command("git", "git", "--3way")
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        for name, data in (("tree", ours), ("release", base), ("patched", theirs)):
            files.append(Path(scratch) / name)
            files[-1].write_bytes(data)
        run = subprocess.run(["git", "merge-file", "--stdout", "--quiet", *files], capture_output=True, check=False)
    return run.stdout if run.returncode == 0 else None


def _compiles(path: str, data: bytes) -> bool:
    try:
        compile(data, path, "exec", dont_inherit=True) if path.endswith(".py") else None
    except (SyntaxError, ValueError):
        return False
    return True
