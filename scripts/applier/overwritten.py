# SPDX-License-Identifier: Apache-2.0
"""Telling a tree that somebody edited from one that another release of SGLang was put over, or that lost our folder.

pip and git leave srt/treeverify where it is when they change the release under it. The originals kept there belong to
the old release then, and nothing of the new one may be overwritten with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from applier.blob import blob_id, file_blob
from applier.hunks import find, split_lines
from applier.layout import HOME
from applier.manifest import Manifest
from applier.patchset import PatchSet, decode, take_out
from applier.tree import Tree

BUILT = "_version.py"  # written when a package is built and different in every release
VERSION_FILES = (BUILT, "version.py")
OURS = HOME.rpartition("/")[2].encode()


def version_marker(tree: Tree) -> dict[str, str] | None:
    """The package's version file with its blob id, for the manifest."""
    for path in VERSION_FILES:
        if (blob := file_blob(tree.path(path))) is not None:
            return {path: blob}
    return None


def changed_files(tree: Tree, manifest: Manifest) -> list[str]:
    """Touched files that are neither the release's nor as applied."""
    return [path for path, blobs in manifest.files.items() if file_blob(tree.path(path)) not in blobs.values()]


def another_release(tree: Tree, manifest: Manifest, patches: PatchSet | None) -> bool:
    """Whether the changed files belong to another release; the version file decides, else the patches, where given.

    A version file that never changes (a git checkout's) says nothing. Then it is another release where no touched file
    is as applied and no hunk of the patches is left.
    """
    changed = changed_files(tree, manifest)
    if not changed:
        return False
    for path, blob in (manifest.version or {}).items():
        if file_blob(tree.path(path)) != blob:
            return True
        if path == BUILT:
            return False
    as_applied = any(file_blob(tree.path(path)) == blobs["applied"] for path, blobs in manifest.files.items())
    return patches is not None and not as_applied and not any(_any_hunk(tree, path, patches) for path in changed)


def without_patches(tree: Tree, path: str, patches: PatchSet | None) -> bytes | None:
    """A file of another release into which the patches were carried, without them; None where that is not so."""
    data = tree.read(path)
    return None if data is None or patches is None else take_out(patches, path, data)


def patched_release(tree: Tree, patches: PatchSet, blobs: dict[str, str]) -> list[str]:
    """Files that are exactly a release's, given by its blob ids, with the patches in, in a tree without our folder.

    None where they may as well come from upstream: where some files lack the patches, and no other names our package.
    """
    found = []
    for path in patches.touched:
        base = without_patches(tree, path, patches)
        if base is not None and blob_id(base) == blobs[path]:
            found.append(path)
    return found if len(found) == len(patches.touched) or any(names_us(tree, path) for path in found) else []


def taken_out(tree: Tree, patches: PatchSet, paths: Iterable[str]) -> dict[str, bytes]:
    """Those of the files that have all the patches do to them, without it."""
    found = {path: without_patches(tree, path, patches) for path in paths}
    return {path: data for path, data in found.items() if data is not None}


def names_us(tree: Tree, path: str) -> bool:
    """Whether a file speaks of our package, which no file of SGLang does."""
    return OURS in (tree.read(path) or b"")


def _any_hunk(tree: Tree, path: str, patches: PatchSet) -> bool:
    data = tree.read(path)
    if data is None:
        return False
    lines = split_lines(decode(data))
    hunks = [hunk for patch in patches.patches for file in patch.files if file.path == path for hunk in file.hunks]
    return any(find(hunk.new, lines) for hunk in hunks)
