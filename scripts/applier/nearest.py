# SPDX-License-Identifier: Apache-2.0
"""Which pin a tree is nearest to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from applier.blob import file_blob
from applier.errors import ApplierError
from applier.fit import standing
from applier.patchset import load_patches
from applier.pin import Pin
from applier.tree import Tree

VERSION = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class Nearness:
    """`same` of the `touched` files that the pin's patches change are as released."""

    pin: Pin
    same: int
    touched: int

    @property
    def share(self) -> float:
        return self.same / max(1, self.touched)

    def __str__(self) -> str:
        return f"{self.pin.name}, {self.same} of {self.touched} touched files as released"


def nearness(tree: Tree, pin: Pin) -> Nearness:
    """How much of a pin's release the tree is."""
    return Nearness(pin, sum(file_blob(tree.path(path)) == blob for path, blob in pin.blobs.items()), len(pin.blobs))


def closest_pin(tree: Tree, pins: list[Pin]) -> Pin:
    """The pin with the largest share of files as released.

    Among equals the tree's own version decides, then the share of hunks that stand in the tree, then the default pin.
    """
    found = [nearness(tree, pin) for pin in pins]
    best = max(item.share for item in found)
    equal = [item.pin for item in found if item.share == best]
    if len(equal) == 1:
        return equal[0]
    version = version_of(tree)
    return max(equal, key=lambda pin: (pin.pypi == version, _standing(tree, pin), pin.default))


def version_of(tree: Tree) -> str | None:
    """The release that the package says it is; None where it doesn't (as a git checkout)."""
    for name in ("_version.py", "version.py"):
        if (data := tree.read(name)) and (match := VERSION.search(data.decode("utf-8", "replace"))):
            return match[1]
    return None


def _standing(tree: Tree, pin: Pin) -> float:
    try:
        patches = load_patches(pin).patches
    except ApplierError:
        return 0.0
    total = sum(len(file.hunks) for patch in patches for file in patch.files)
    return sum(standing(patch, tree.read) for patch in patches) / max(1, total)
