# SPDX-License-Identifier: Apache-2.0
"""What a tree is: clean, applied, partial, drifted or edited, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from applier import names
from applier.blob import blob_id, file_blob
from applier.hunks import split_lines, state_of
from applier.journal import owned, pending
from applier.layout import CHECKOUT, HOME, JOURNAL, LIBRARY, MANIFEST, ORIGINALS
from applier.manifest import Manifest, load_manifest
from applier.overwritten import another_release, names_us, patched_release
from applier.patchset import Patch, decode
from applier.release import Release, known_patches
from applier.tree import Tree

EXIT_OK = ("clean", "applied")


@dataclass(frozen=True)
class Difference:
    """A file that is not what it should be; blob ids, None where the file is missing."""

    path: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        def short(blob: str | None) -> str:
            return blob[:12] if blob else "no file"

        return f"{names.shown(self.path)}: expected {short(self.expected)}, found {short(self.found)}"


@dataclass
class State:
    """`edits` are files the user changed since apply; `unknown` those that are not the pin's before it.

    `foreign` are touched files that another release put over was found with, `ours` those that are patched although
    the tree has no manifest.
    """

    state: str
    pin: str
    manifest: Manifest | None
    patches: dict[str, str]
    overlay: dict[str, str]
    kernels: dict[str, str]
    edits: list[Difference] = field(default_factory=list)
    unknown: list[Difference] = field(default_factory=list)
    foreign: list[Difference] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The fields scripts may rely on."""
        return {
            "state": self.state,
            "pin": self.pin,
            "patches": [{"name": name, "state": state} for name, state in self.patches.items()],
            "overlay": {
                "state": _summary(self.overlay),
                "files": [{"path": path, "state": state} for path, state in self.overlay.items()],
            },
            "kernels": [{"arch": arch, "state": state} for arch, state in self.kernels.items()],
            "differs": [vars(item) for item in self.edits + self.foreign + self.unknown],
            "reasons": self.reasons,
        }


def inspect(tree: Tree, release: Release, kernel_sources: str) -> State:
    """Compares the tree with its manifest where it has one, with the pin otherwise. Reads only."""
    manifest = load_manifest(tree)
    if manifest is None:
        return _with_pending(tree, _untouched(tree, release))
    return _with_pending(tree, _patched(tree, manifest, release, kernel_sources))


def inspect_recorded(tree: Tree, manifest: Manifest) -> State:
    """Compares a patched tree with its manifest alone: enough to revert, whatever this checkout knows of its pin."""
    return _with_pending(tree, _patched(tree, manifest, None, None))


def _with_pending(tree: Tree, result: State) -> State:
    if pending(tree):
        result.state = "partial"
        result.reasons.insert(0, "a run was interrupted here; any command that may write settles it")
    return result


def _untouched(tree: Tree, release: Release) -> State:
    pin = release.pin
    unknown = [
        Difference(path, blob, found)
        for path, blob in pin.blobs.items()
        if (found := file_blob(tree.path(path))) != blob
    ]
    strays = list(_strays(tree, set()))
    patches = {patch.name: "absent" for patch in release.patches.patches}
    overlay = {path: "absent" for path in release.overlay}
    if unknown:
        patches = {patch.name: _patch_state(tree, patch) for patch in release.patches.patches}
    for path in release.overlay:
        found = file_blob(tree.path(path))
        if found is not None:
            overlay[path] = "applied" if found == blob_id(release.overlay[path]) else "edited"
    ours = patched_release(tree, release.patches, pin.blobs) if unknown else []
    reasons = [f"{names.shown(path)}: in the way, not put there by apply" for path in strays]
    if not unknown and not strays:
        state = "clean"
    elif ours and not strays:
        state = "partial"
        reasons.append(f"patched by treeverify, but its folder {HOME} is gone")
    elif strays or any(names_us(tree, item.path) for item in unknown):
        state = "partial"
        reasons.append(f"patched, but without {MANIFEST}: not by this tool, or the manifest was deleted")
    else:
        state = "drifted"
        reasons.append(f"{len(unknown)} of {len(pin.blobs)} files are not those of {pin.name}")
        if there := [name for name, kind in patches.items() if kind == "applied"]:
            reasons.append(f"without our doing it has what these patches do, as upstream may: {', '.join(there)}")
    return State(state, pin.name, None, patches, overlay, {}, unknown=unknown, ours=ours, reasons=reasons)


def _patched(
    tree: Tree,
    manifest: Manifest,
    release: Release | None,
    kernel_sources: str | None,
) -> State:
    same = release if release is not None and release.pin.name == manifest.pin else None
    patches = same.patches if same else known_patches(CHECKOUT, manifest.pin)
    another = another_release(tree, manifest, patches)
    foreign: list[Difference] = []
    edits: list[Difference] = []
    reasons: list[str] = []
    at_base: list[str] = []
    for path, blobs in manifest.files.items():
        found = file_blob(tree.path(path))
        if found == blobs["base"] != blobs["applied"]:
            at_base.append(path)
        elif found != blobs["applied"]:
            (foreign if another else edits).append(Difference(path, blobs["applied"], found))
    overlay: dict[str, str] = {}
    for path, blob in manifest.overlay.items():
        found = file_blob(tree.path(path))
        overlay[path] = "applied" if found == blob else "absent" if found is None else "edited"
        if overlay[path] == "edited":
            edits.append(Difference(path, blob, found))
    for blob in {blobs["base"] for blobs in manifest.files.values()}:
        found = file_blob(tree.path(f"{ORIGINALS}/{blob}"))
        if found != blob:
            edits.append(Difference(f"{ORIGINALS}/{blob}", blob, found))
    kernels: dict[str, str] = {}
    if manifest.kernels is not None:
        found = file_blob(tree.path(LIBRARY))
        stale = kernel_sources is not None and manifest.kernels.sources != kernel_sources
        kind = (
            "missing"
            if found is None
            else "edited"
            if found != manifest.kernels.library
            else "stale"
            if stale
            else "built"
        )
        kernels = {arch: kind for arch in manifest.kernels.arches}
    ours = {MANIFEST, *manifest.overlay} | ({LIBRARY} if manifest.kernels else set())
    edits += [Difference(path, None, file_blob(tree.path(path))) for path in _strays(tree, ours)]

    absent = [path for path, state in overlay.items() if state == "absent"]
    if foreign:
        state = "drifted"
        reasons.append(
            "another release of SGLang was put over the patched one, and brought these files: "
            + ", ".join(item.path for item in foreign)
        )
    elif edits:
        state = "edited"
        reasons.append("files were changed since they were applied")
    elif at_base or absent or "missing" in kernels.values():
        state = "partial"
        reasons += [f"{path}: back at the release's content" for path in at_base]
        reasons += [f"{path}: missing" for path in absent]
        reasons += [f"{LIBRARY}: missing"] * ("missing" in kernels.values())
    elif release is None:
        state = "applied"
    elif manifest.pin != release.pin.name:
        state = "drifted"
        reasons.append(f"patched for {manifest.pin}, asked for {release.pin.name}")
    elif manifest.patch_set != release.digest:
        state = "drifted"
        reasons.append("patched from another version of the patch set")
    elif set(kernels.values()) & {"stale", "edited"}:
        state = "drifted"
        reasons.append("kernels were built from other sources")
    else:
        state = "applied"
    if state in ("applied", "drifted") and not foreign:
        states = {name: "applied" for name in manifest.patches}
    else:
        known = {patch.name: patch for patch in patches.patches} if patches else {}
        states = {name: _patch_state(tree, known[name]) if name in known else "drifted" for name in manifest.patches}
    return State(state, manifest.pin, manifest, states, overlay, kernels, edits=edits, foreign=foreign, reasons=reasons)


def _patch_state(tree: Tree, patch: Patch) -> str:
    states = set()
    for file in patch.files:
        data = tree.read(file.path)
        states.add("drifted" if data is None else state_of(file.hunks, split_lines(decode(data))))
    return states.pop() if len(states) == 1 else "drifted" if "drifted" in states else "partial"


def _strays(tree: Tree, ours: set[str]) -> Iterator[str]:
    """Files in our folder that are not `ours`, byte code left out; `ours` is empty where there is no manifest."""
    for path in sorted(tree.path(HOME).rglob("*")):
        rel = path.relative_to(tree.package).as_posix()
        if path.is_dir() or "__pycache__" in path.parts or (ours and rel.startswith(f"{ORIGINALS}/")):
            continue
        if rel not in ours and not (rel.startswith(f"{JOURNAL}/") and owned(tree)):
            yield rel


def _summary(states: dict[str, str]) -> str:
    kinds = set(states.values())
    return kinds.pop() if len(kinds) == 1 else "edited" if "edited" in kinds else "partial" if kinds else "absent"
