# SPDX-License-Identifier: Apache-2.0
"""What a checkout wants in a tree: a pin, its patches, its overlay."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from applier import names
from applier.blob import folder_digest
from applier.errors import ApplierError, UsageError
from applier.layout import HOME, JOURNAL, MANIFEST, ORIGINALS, Layout
from applier.patchset import PatchSet, load_patches
from applier.pin import Pin, choose_pin

RESERVED = (MANIFEST, JOURNAL, ORIGINALS, f"{HOME}/_kernels")


@dataclass(frozen=True)
class Release:
    """`overlay` maps paths below the package to contents."""

    pin: Pin
    patches: PatchSet
    overlay: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Changes whenever a patch or an overlay file does."""
        return hashlib.sha256(f"{self.patches.digest}{folder_digest(self.overlay)}".encode()).hexdigest()


def load_release(layout: Layout, pin: Pin) -> Release:
    """Patches of the pin, plus overlay/ without what the pin does not take, and with what its own adds or replaces."""
    shared = overlay_files(layout.overlay)
    for path in pin.without:
        if shared.pop(path, None) is None:
            raise UsageError(f"{pin.folder / 'pin.toml'}: [overlay] without {path!r}, which {layout.overlay} has not")
    overlay = {**shared, **overlay_files(pin.folder / "overlay")}
    for path in overlay:
        if what := names.fault(path):
            raise UsageError(f"overlay file {path!r} {what}")
        if not path.startswith(f"{HOME}/") or any(names.below(path, reserved) for reserved in RESERVED):
            raise UsageError(f"overlay file {path}: only {HOME}/ may be added to, and not {', '.join(RESERVED)}")
    if what := names.clash(overlay):
        raise UsageError(f"overlay files {what}")
    return Release(pin, load_patches(pin), overlay)


def known_patches(layout: Layout, pin: str) -> PatchSet | None:
    """Patches of the pin of that name, None where this checkout doesn't have them or can't read them."""
    try:
        return load_patches(choose_pin(layout, pin))
    except (ApplierError, OSError, ValueError):
        return None


def takes(path: str) -> bool:
    """Whether a file of the package may be part of an overlay: in our folder, nothing of the tool's, nothing hidden."""
    inside = path.startswith(f"{HOME}/") and not path.startswith(RESERVED)
    return inside and not any(part.startswith(".") or part == "__pycache__" for part in path.split("/"))


def overlay_files(folder: Path) -> dict[str, bytes]:
    """Contents by path; what tools leave behind (byte code, hidden caches) is not part of an overlay."""
    found = {}
    for path in sorted(folder.rglob("*")):
        rel = path.relative_to(folder)
        if path.is_symlink():
            raise UsageError(f"{path} is a link; an overlay has files only: put a copy there")
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in rel.parts):
            found[rel.as_posix()] = path.read_bytes()
    return found
