# SPDX-License-Identifier: Apache-2.0
"""Patched files of somebody's fork: what they were, and their edits carried over to the release's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from applier.bootstrap import provide_command
from applier.errors import DriftError
from applier.fit import CONFLICT, UNKNOWN, fit_patches
from applier.manifest import Manifest
from applier.merge import merge
from applier.patchset import PatchSet
from applier.pin import Pin
from applier.plan import forked, original
from applier.release import Release
from applier.tree import Tree

Read = Callable[[str], "bytes | None"]


@dataclass(frozen=True)
class Fork:
    """A file that was not the release's when it was patched; `patched` is what this checkout's patches make of `base`.

    `now` is what the tree has of it.
    """

    path: str
    base: bytes
    patched: bytes
    now: bytes | None

    def edited(self, now: bytes, mine: bytes, pin: Pin) -> bytes:
        """The edits between `patched` and `now`, made in `mine`, the release's file with the patches in."""
        result = merge(mine, self.patched, now)
        if result is None:
            raise _in_the_way(pin, [self.path])
        return result


def forks_of(tree: Tree, release: Release, manifest: Manifest, released: Read) -> dict[str, Fork]:
    """Files of a fork among the patched ones; `released` gives them as the release has them."""
    bases = {path: original(tree, path, manifest.files[path]["base"]) for path in forked(release, manifest)}
    if bases:
        provide_command("git", "git", "refresh in a fork")
    fit = fit_patches(release.patches, bases.get, released)
    return {path: Fork(path, base, fit.content.get(path, base), tree.read(path)) for path, base in bases.items()}


def require_same(forks: dict[str, Fork], patches: PatchSet, released: Read, pin: Pin) -> None:
    """DriftError where `patches` would not make of a file of a fork what the tree has of it."""
    bases = {path: fork.base for path, fork in forks.items()}
    fit = fit_patches(patches, bases.get, released)
    files = [file for patch in fit.patches for file in patch.files]
    bad = {file.path for file in files if file.state in (CONFLICT, UNKNOWN)}
    if wrong := [path for path, base in bases.items() if path in bad or fit.content.get(path, base) != forks[path].now]:
        raise _in_the_way(pin, wrong)


def _in_the_way(pin: Pin, paths: list[str]) -> DriftError:
    return DriftError(
        f"these files were not {pin.name}'s when they were patched (--force or --3way), and their edits stand where "
        f"they differ from it, so no patch for {pin.name} can hold them; nothing was written. Make the edits in a tree "
        "of the release (`apply.py apply` without --sglang makes one) and refresh from there, or start a pin of the "
        "fork's own with `apply.py port`",
        paths,
    )
