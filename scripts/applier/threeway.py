# SPDX-License-Identifier: Apache-2.0
"""--3way: carrying the patches over to files that are not quite the release's, or refusing whole."""

from __future__ import annotations

from applier.bootstrap import provide_command
from applier.drift import fit_lines
from applier.errors import DriftError
from applier.fit import CONFLICT, UNKNOWN, Fit, fit_patches
from applier.release import Release
from applier.released import released_file
from applier.tree import Tree


def merge_patches(tree: Tree, release: Release, base: dict[str, bytes]) -> Fit:
    """Every patch on the files of `base`, exactly where it fits and by git's merge with the release elsewhere.

    git and the release are needed for the latter alone. DriftError with the report where a patch conflicts; no conflict
    marker is ever written.
    """

    def released(path: str) -> bytes | None:
        provide_command("git", "git", "a three-way merge")
        return released_file(tree, release.pin, path)

    fit = fit_patches(release.patches, base.get, released)
    if fit.state in (CONFLICT, UNKNOWN):
        names = ", ".join(patch.name for patch in fit.named(CONFLICT, UNKNOWN))
        raise DriftError(
            f"the merge has conflicts: {names}; nothing was changed",
            fit_lines(fit, release.pin),
            {"patches": [patch.as_json() for patch in fit.patches]},
        )
    return fit
