# SPDX-License-Identifier: Apache-2.0
"""Ways out of a tree that is patched and has no manifest to revert by: lost, or never committed with the files."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable

from applier.blob import file_blob
from applier.fit import taken_back
from applier.gitinfo import commit_without, head_holds
from applier.overwritten import OURS, names_us, taken_out, without_patches
from applier.patchset import put_in
from applier.release import Release
from applier.released import released_file
from applier.state import State
from applier.tree import Tree, command_line

TAKE_OUT = "take the patches out, which leaves the release's files as they were"
TAKE_OUT_ANYWAY = "take the patches out of files that are not all the release's; copies are kept in build/"


def removable(tree: Tree, release: Release, state: State, force: bool = False) -> dict[str, bytes]:
    """Patched files without the patches: those that are then the release's by blob id; with `force` all that have them.

    In a fork they may have moved; a merge takes them out then. None of a tree in which the patches may as well come
    from upstream: where no file speaks of our package.
    """
    if state.manifest is not None or state.state != "partial":
        return {}
    found = taken_out(tree, release.patches, state.ours)
    paths = [item.path for item in state.unknown]
    if force and any(names_us(tree, path) for path in paths):
        merged = {path: _merged_out(tree, release, path) for path in paths if path not in found}
        found |= {path: data for path, data in merged.items() if data is not None}
    return found


def _merged_out(tree: Tree, release: Release, path: str) -> bytes | None:
    """A file without all the patches do to it, exactly or by git's merge with the release, where that is at hand."""
    exact = without_patches(tree, path, release.patches)
    now, base = tree.read(path), released_file(tree, release.pin, path, fetch=False)
    if exact is not None or now is None or base is None or b"\0" in now or shutil.which("git") is None:
        return exact
    return taken_back(now, base, put_in(release.patches, path, base))


def ways_back(tree: Tree, release: Release, state: State) -> list[tuple[str, str]]:
    """What to do, and how to type it, until no file is patched."""
    out = removable(tree, release, state, force=True)
    found = [(TAKE_OUT_ANYWAY, command_line(tree, "revert --force"))] if out else []
    if out and set(out) == set(state.ours):
        found = [(TAKE_OUT, command_line(tree, "revert"))]
    rest = [item.path for item in state.unknown if item.path not in out and names_us(tree, item.path)]
    return found + _from_elsewhere(tree, release, rest)


def _from_elsewhere(tree: Tree, release: Release, paths: Iterable[str]) -> list[tuple[str, str]]:
    """git gives back what was not committed, or names the commit before; pip else."""
    if tree.git_root is None:
        install = f"pip install --force-reinstall --no-deps sglang=={release.pin.pypi}"
        return [("restore the release's files first", install)] if paths else []
    commits: dict[str | None, list[str]] = {}
    for path in paths:
        blob = file_blob(tree.path(path))
        committed = blob is not None and head_holds(tree, path, blob)
        commit = commit_without(tree, path, OURS) if committed else ""
        commits.setdefault(commit, []).append(tree.path(path).relative_to(tree.git_root).as_posix())
    git = ["git", "-C", str(tree.git_root), "checkout"]
    found = []
    for commit, files in commits.items():
        if commit is None:
            text = (
                f"get the release, and copy from its wheel what no commit has without the patches: {', '.join(files)}"
            )
            found.append((text, f"python3 -m pip download --no-deps sglang=={release.pin.pypi}"))
        else:
            text = "restore files as they were before the patches were committed" if commit else "restore files first"
            found.append((text, shlex.join([*git, *([commit[:12]] if commit else []), "--", *files])))
    return found
