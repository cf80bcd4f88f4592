# SPDX-License-Identifier: Apache-2.0
"""Edits of a patched tree, brought back into patch files and overlay."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from applier import names
from applier.attribution import Edit, Owner, Stages, owner, stages, with_edits
from applier.blob import blob_id
from applier.checkoutfiles import replace_all
from applier.errors import DriftError, UsageError
from applier.forks import Fork, forks_of, require_same
from applier.hunks import FilePatch, split_lines
from applier.journal import Change, carry_out
from applier.layout import HOME, MANIFEST, ORIGINALS, Layout
from applier.linediff import changes, unified
from applier.manifest import Manifest, load_manifest
from applier.patchset import apply_patches, decode, encode, load_patches
from applier.patchtext import PatchText, parse
from applier.pin import Pin, choose_pin, load_pin
from applier.pintext import settled, with_blobs, without
from applier.plan import forked, original, refuse_edits
from applier.release import Release, load_release, takes
from applier.released import released_file
from applier.settling import TODO
from applier.state import inspect_recorded
from applier.tree import Tree


@dataclass(frozen=True)
class Taken:
    """An edit at `line` (1-based) of a file of the tree, and where it went."""

    path: str
    line: int
    into: str
    why: str


@dataclass
class Refresh:
    """`writes` maps files of the checkout to contents (None: removed); `left` are files that wait for `apply`."""

    writes: dict[str, bytes | None] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    originals: dict[str, bytes] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "written": sorted(path for path, data in self.writes.items() if data is not None),
            "removed": sorted(path for path, data in self.writes.items() if data is None),
            "edits": [vars(item) for item in self.taken],
            "empty": self.empty,
            "left": self.left,
            "ignored": self.ignored,
        }


@dataclass(frozen=True)
class Wish:
    """What the user asks for: `patch` gets every edit, `add` are files that no patch touches yet."""

    patch: str | None = None
    add: tuple[str, ...] = ()
    drop_empty: bool = False


def refresh_tree(
    layout: Layout, tree: Tree, wish: Wish, pin: str | None = None, dry_run: bool = False
) -> tuple[Pin, Refresh]:
    """Takes the edits of a patched tree over: patches and overlay first, then the tree's manifest.

    A run that was killed in between is finished by the next. The caller holds the locks of both.
    """
    manifest = load_manifest(tree)
    if manifest is None:
        raise DriftError(f"{tree.package} is not patched, so there are no edits of patches in it")
    if (state := inspect_recorded(tree, manifest)).foreign:
        refuse_edits(tree, state)
    release = load_release(layout, choose_pin(layout, manifest.pin))
    if pin and pin not in (manifest.pin, release.pin.tag, release.pin.pypi):
        raise UsageError(f"{tree.package} is patched for {manifest.pin}, not for {pin}")
    plan = plan_refresh(layout, tree, release, manifest, wish)
    if not dry_run:
        replace_all(layout.root, layout.patches, plan.writes)
        release = load_release(layout, load_pin(release.pin.folder))
        carry_out(tree, manifest_changes(tree, manifest, release, plan))
    return release.pin, plan


def plan_refresh(layout: Layout, tree: Tree, release: Release, manifest: Manifest, wish: Wish) -> Refresh:
    """Raises DriftError or UsageError where an edit has no place to go; nothing is written either way."""
    plan = Refresh()
    slots = _slots(release, wish.patch)
    files = _files(tree, release, manifest, wish)
    forks = forks_of(tree, release, manifest, files.get)
    patched: dict[str, bytes] = {}
    for path, base in files.items():
        _refresh_file(plan, tree, release, manifest, wish, slots, path, base, forks, patched)
    if plan.emptied and not wish.drop_empty:
        raise DriftError(
            "nothing is left in the tree of what patches do to these files; nothing was written. "
            "`apply.py apply` puts it in again, `apply.py refresh --drop-empty` takes it out of the patches",
            plan.emptied,
        )
    _write_patches(plan, layout, release, manifest, slots, files)
    _refresh_overlay(plan, layout, tree, release, manifest)
    _prove(plan, layout, release, files, patched, forks)
    return plan


def manifest_changes(tree: Tree, manifest: Manifest, release: Release, plan: Refresh) -> list[Change]:
    """What makes the tree's manifest say that the edits are applied; `release` is the checkout's with them written.

    Where files wait for `apply`, the digest stays the old one's, so that `status` tells.
    """
    read = {path: tree.read(path) for path in {*release.patches.touched, *release.overlay}}
    waiting = set(manifest.files) & set(release.pin.blobs) - set(release.patches.touched)  # of a pin to be settled
    files = {path: manifest.files[path] for path in waiting}
    files |= {
        path: {
            "base": manifest.files.get(path, {}).get("base", release.pin.blobs[path]),
            "applied": manifest.files[path]["applied"] if path in plan.left else blob_id(read[path] or b""),
        }
        for path in release.patches.touched
    }
    overlay = {path: blob_id(data) for path in release.overlay if path not in plan.left and (data := read[path])}
    overlay |= {path: blob for path, blob in manifest.overlay.items() if path in plan.left}
    new = replace(
        manifest,
        patch_set=manifest.patch_set if plan.left else release.digest,
        patches=[patch.name for patch in release.patches.patches],
        files=files,
        overlay=overlay,
    )
    gone = {blobs["base"] for blobs in manifest.files.values()} - {blobs["base"] for blobs in files.values()}
    changes = [Change(f"{ORIGINALS}/{blob_id(data)}", None, data) for data in plan.originals.values()]
    changes += [Change(rel, tree.read(rel), None) for rel in sorted(f"{ORIGINALS}/{blob}" for blob in gone)]
    return [*changes, Change(MANIFEST, tree.read(MANIFEST), new.encode())]


def _slots(release: Release, wanted: str | None) -> list[PatchText]:
    """The patches of the series as text, with the one that is to be settled where it is asked for."""
    folder = release.pin.folder
    slots = [_read(folder, patch.name) for patch in release.patches.patches]
    if wanted is None or wanted in (slot.name for slot in slots):
        return slots
    waiting = folder / (wanted + TODO)
    if not waiting.is_file():
        known = ", ".join(slot.name for slot in slots)
        raise UsageError(f"{release.pin.name} has no patch {wanted}; it has {known}")
    series = settled((folder / "series").read_text(encoding="utf-8"), wanted)
    names = [line.split("#")[0].strip() for line in series.splitlines()]
    at = [name for name in names if name].index(wanted)
    text = parse(wanted, waiting.read_bytes().decode("utf-8"))
    slots.insert(at, PatchText(wanted, text.header, {}, text.prefix))
    return slots


def _files(tree: Tree, release: Release, manifest: Manifest, wish: Wish) -> dict[str, bytes]:
    """Files that may have edits, as released."""
    pin = release.pin
    own = forked(release, manifest)
    found = {path: original(tree, path, blobs["base"]) for path, blobs in manifest.files.items() if path not in own}
    others = [path for path, blob in pin.blobs.items() if path not in manifest.files and _blob(tree.read(path)) != blob]
    for path in [*own, *others, *wish.add]:
        if path in found:
            continue
        base = None if names.fault(path) else released_file(tree, pin, path)
        if base is None or path.startswith(f"{HOME}/"):
            raise UsageError(f"--add {path!r}: {pin.name} has no such file; new files belong into {HOME}/")
        found[path] = base
    return found


def _refresh_file(
    plan: Refresh,
    tree: Tree,
    release: Release,
    manifest: Manifest,
    wish: Wish,
    slots: list[PatchText],
    path: str,
    base: bytes,
    forks: dict[str, Fork],
    patched: dict[str, bytes],
) -> None:
    through = stages(_patches_of(release, slots, path), split_lines(decode(base)))
    mine = encode("".join(through.lines[-1]))
    here = forks[path].patched if path in forks else mine
    now = tree.read(path)
    patched[path] = mine
    if now is None:
        raise DriftError(f"{path} is missing from the tree; `apply.py revert --force` and `apply.py apply` mend it")
    recorded = manifest.files.get(path, {}).get("applied", blob_id(base))
    if now == here:
        return
    if blob_id(now) == recorded:
        plan.left.append(path)
        return
    if blob_id(here) != recorded:
        raise DriftError(
            f"{path} was edited in the tree, and the patches changed since they were applied; nothing was written. "
            "Keep the edits, `apply.py revert --force`, `apply.py apply`, and make them again"
        )
    if not now:
        raise DriftError(f"{path} is empty now, and patches empty no files; nothing was written. Undo that by hand")
    if (crlf := now.count(b"\r\n")) and crlf == now.count(b"\n") and b"\r\n" not in here:
        raise DriftError(
            f"{path} has CRLF line ends now, in every line, and {release.pin.name} has LF; nothing was written. "
            "An editor or git's core.autocrlf does that: convert it back"
        )
    after = now if path not in forks else forks[path].edited(now, mine, release.pin)
    edits = _edits(mine, after)
    owners = [_owner(through, edit, slots, wish.patch, path) for edit in edits]
    names = [slot.name for slot in slots]
    result = with_edits(through, edits, [item.patch for item in owners], names)
    for i, slot in enumerate(slots):
        old, new = through.lines[i : i + 2], result.lines[i : i + 2]
        if old == new:
            continue
        section = decode(unified(f"{slot.prefix}{path}", encode("".join(new[0])), encode("".join(new[1]))))
        if path in slot.sections and not section:
            plan.emptied.append(f"{slot.name}: {path}")
        slot.put(path, section)
    shown = _edits(here, now)
    shown = shown if len(shown) == len(edits) else edits
    plan.taken += [Taken(path, _line(shown, i) + 1, names[item.patch], item.why) for i, item in enumerate(owners)]
    patched[path] = after


def _edits(before: bytes, after: bytes) -> list[Edit]:
    return [
        Edit(at, at + len(hunk.old), hunk.new)
        for hunk in changes(before, after)
        for at in [hunk.start - 1 if hunk.old else hunk.start]
    ]


def _owner(through: Stages, edit: Edit, slots: list[PatchText], wanted: str | None, path: str) -> Owner:
    names = [slot.name for slot in slots]
    if wanted is not None:
        return Owner(names.index(wanted), "as --patch says")
    found = owner(through, edit)
    if found is None:
        raise UsageError(f"no patch touches {path}, which was edited; say with --patch which one is to")
    return found


def _line(edits: list[Edit], i: int) -> int:
    """Where an edit begins in the edited file."""
    return edits[i].start + sum(len(edit.new) - (edit.stop - edit.start) for edit in edits[:i])


def _write_patches(
    plan: Refresh,
    layout: Layout,
    release: Release,
    manifest: Manifest,
    slots: list[PatchText],
    files: dict[str, bytes],
) -> None:
    pin = release.pin
    before = (pin.folder / "series").read_text(encoding="utf-8")
    series = before
    for slot in slots:
        path = pin.folder / slot.name
        if not slot.sections:
            if path.exists():
                plan.empty.append(slot.name)
                plan.writes[_rel(layout, path)] = None
                series = without(series, slot.name)
            continue
        try:
            data = slot.render().encode()
        except UnicodeEncodeError:
            raise UsageError(f"{slot.name} would hold bytes that are no UTF-8; patches are text") from None
        if not path.exists():
            series = settled(series, slot.name)
        if not path.exists() or path.read_bytes() != data:
            plan.writes[_rel(layout, path)] = data
    if series != before:
        plan.writes[_rel(layout, pin.folder / "series")] = series.encode()
    touched = {path for slot in slots for path in slot.sections}
    blobs = {path: blob for path, blob in pin.blobs.items() if path in touched or path not in release.patches.touched}
    blobs |= {path: blob_id(files[path]) for path in touched if path in files}
    plan.originals = {path: files[path] for path in sorted(touched - set(manifest.files))}
    if blobs != pin.blobs:
        toml = with_blobs((pin.folder / "pin.toml").read_text(encoding="utf-8"), blobs)
        plan.writes[_rel(layout, pin.folder / "pin.toml")] = toml.encode()


def _refresh_overlay(plan: Refresh, layout: Layout, tree: Tree, release: Release, manifest: Manifest) -> None:
    there = {path.relative_to(tree.package).as_posix() for path in tree.path(HOME).rglob("*") if path.is_file()}
    new = {path for path in there if takes(path)} - set(manifest.overlay) - set(release.overlay)
    for path in sorted(new):
        if what := names.fault(path):
            raise UsageError(f"{path!r} {what}, so it can't go to the overlay; nothing was written. Rename it first")
    if what := names.clash({*release.overlay, *new}):
        raise UsageError(f"in an overlay {what}; nothing was written. Rename one first")
    plan.ignored = sorted(names.shown(path) for path in there if any(part.startswith(".") for part in path.split("/")))
    for path in sorted({*manifest.overlay, *release.overlay, *new}):
        now, mine = _blob(tree.read(path)), _blob(release.overlay.get(path))
        recorded = manifest.overlay.get(path)
        if now == mine:
            continue
        if now is None or now == recorded:
            plan.left.append(path)
        elif mine != recorded:
            raise DriftError(
                f"{path} was edited in the tree, and in this checkout since it was applied; nothing was written. "
                "Bring the two together by hand"
            )
        else:
            data = tree.read(path)
            target = release.pin.folder / "overlay" / path
            target = target if target.exists() or path in release.pin.without else layout.overlay / path
            plan.writes[_rel(layout, target)] = data
            plan.taken.append(Taken(path, 1, _rel(layout, target), "edited" if mine else "new"))


def _prove(
    plan: Refresh,
    layout: Layout,
    release: Release,
    files: dict[str, bytes],
    patched: dict[str, bytes],
    forks: dict[str, Fork],
) -> None:
    """Reads what would be written as `apply` will, and compares what it makes with the tree."""
    pin = release.pin
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(pin.folder, Path(scratch) / pin.name))
        for rel, data in plan.writes.items():
            path = layout.root / rel
            if not path.is_relative_to(pin.folder):
                continue
            target = folder / path.relative_to(pin.folder)
            if data is None:
                target.unlink()
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        patches = load_patches(load_pin(folder))
    made = {**files, **apply_patches(patches, files.get)}
    wrong = [path for path, data in patched.items() if made[path] != data]
    if wrong:
        raise DriftError("the patches that would be written do not make these files of the tree; report it", wrong)
    edited = {path: fork for path, fork in forks.items() if fork.now != fork.patched and path not in plan.left}
    require_same(edited, patches, files.get, pin)


def _patches_of(release: Release, slots: list[PatchText], path: str) -> list[FilePatch | None]:
    known = {patch.name: {file.path: file for file in patch.files} for patch in release.patches.patches}
    return [known.get(slot.name, {}).get(path) for slot in slots]


def _read(folder: Path, name: str) -> PatchText:
    return parse(name, (folder / name).read_bytes().decode("utf-8"))


def _rel(layout: Layout, path: Path) -> str:
    return path.relative_to(layout.root).as_posix()


def _blob(data: bytes | None) -> str | None:
    return None if data is None else blob_id(data)
