# SPDX-License-Identifier: Apache-2.0
"""Which pin a tree is nearest to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from applier.blob import file_blob
from applier.errors import ApplierError, DriftError
from applier.fit import standing
from applier.layout import Layout
from applier.manifest import load_manifest
from applier.patchset import load_patches
from applier.pin import Pin, load_pins
from applier.tree import Tree, command_line

VERSION = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class Nearness:
    """`same` of the `touched` files that identify the pin are as released."""

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


def pin_of(tree: Tree, layout: Layout) -> Pin:
    """The pin that a tree is patched for, else the one that it is nearest to."""
    manifest, pins = load_manifest(tree), load_pins(layout)
    if manifest is None:
        return closest_pin(tree, pins)
    for pin in pins:
        if pin.name == manifest.pin:
            return pin
    known = ", ".join(pin.name for pin in pins) or "none"
    raise DriftError(
        f"{tree.package} is patched for {manifest.pin!r}, which this checkout does not have (it has {known}); "
        "nothing was changed. Use the treeverify checkout that patched it, or take the patches out with "
        f"`{command_line(tree, 'revert')}`, which needs the tree alone"
    )


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
