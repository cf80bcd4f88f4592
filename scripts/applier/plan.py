# SPDX-License-Identifier: Apache-2.0
"""What apply and revert would write, worked out in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from applier.blob import blob_id
from applier.contract import require_contract
from applier.drift import examine
from applier.errors import DriftError
from applier.fit import Fit, fit_patches
from applier.journal import Change
from applier.kernels import Built
from applier.layout import CHECKOUT, HOME, LIBRARY, MANIFEST, ORIGINALS
from applier.manifest import Kernels, Manifest
from applier.overwritten import another_release, version_marker, without_patches
from applier.patchset import PatchSet, apply_patches
from applier.release import Release, known_patches
from applier.restoring import ways_back
from applier.say import note
from applier.settling import REPORT, to_settle, unsettled
from applier.state import State
from applier.threeway import merge_patches
from applier.tree import Tree, command_line

Read = Callable[[str], "bytes | None"]


@dataclass(frozen=True)
class Plan:
    """`base` and `patched` map touched files to contents: the release's, and with the patches in.

    `seen` is what every file that may be written held when the plan was made; a build can take minutes.
    `fit` tells how each patch went in.
    """

    base: dict[str, bytes]
    patched: dict[str, bytes]
    seen: dict[str, bytes | None]
    fit: Fit
    version: dict[str, str] | None = None


def plan_apply(
    tree: Tree, release: Release, state: State, force: bool = False, three_way: bool = False, fetch: bool = False
) -> Plan:
    """Identity, then the dtype contract, then the patches; raises what stands in the way. Writes nothing.

    A refusal tells how every patch fits; `fetch` lets it get the release for that.
    """
    refuse_edits(tree, state)
    if (open_points := unsettled(release.pin.folder)) and not force:
        raise DriftError(
            f"{release.pin.name} is no finished pin: {to_settle(len(open_points))}, see {REPORT} in its folder; "
            "--force applies what there is, to settle the rest in the tree",
            open_points,
        )
    if state.manifest is None:
        _require_identity(tree, release, state, force or three_way, fetch)
    elif state.manifest.pin != release.pin.name:
        raise DriftError(f"the tree is patched for {state.manifest.pin}; revert it before applying {release.pin.name}")
    base = originals(tree, state.manifest)
    for path in release.patches.touched:
        if path not in base and (data := tree.read(path)) is not None:
            base[path] = data

    def pristine(path: str) -> bytes | None:
        return base[path] if path in base else tree.read(path)

    require_contract(release.pin, pristine)
    if three_way or forked(release, state.manifest):
        fit = merge_patches(tree, release, base)
    else:
        _require_exact(tree, release, state, pristine, fetch)
        fit = fit_patches(release.patches, pristine, None)
    patched = dict(fit.content)
    if open_points:  # edits of files that no patch of the pin touches yet are to be told from the release
        base |= {path: data for path in release.pin.blobs if path not in base and (data := tree.read(path)) is not None}
        patched |= {path: data for path, data in base.items() if path not in patched and path in release.pin.blobs}
    kept = [f"{ORIGINALS}/{blob_id(data)}" for data in base.values()]
    paths = {*base, *release.overlay, *kept, *_ours(state.manifest), LIBRARY, MANIFEST}
    return Plan(base, patched, {path: tree.read(path) for path in paths}, fit, version_marker(tree))


def apply_changes(release: Release, plan: Plan, kernels: Built | Kernels | None) -> list[Change]:
    """The plan as file changes, the manifest last. `kernels`: a new library, what the tree has and keeps, or none."""
    wanted: dict[str, bytes] = dict(release.overlay)
    wanted |= {f"{ORIGINALS}/{blob_id(plan.base[path])}": plan.base[path] for path in plan.patched}
    kept: Kernels | None = kernels if isinstance(kernels, Kernels) else None
    if isinstance(kernels, Built):
        library = kernels.library.read_bytes()
        wanted[LIBRARY] = library
        kept = Kernels(kernels.sources, kernels.arches, kernels.nvcc, blob_id(library))
    elif (library_now := plan.seen[LIBRARY]) is not None and kept is not None:
        wanted[LIBRARY] = library_now
    wanted |= {path: plan.patched.get(path, data) for path, data in plan.base.items()}
    manifest = Manifest(
        pin=release.pin.name,
        patch_set=release.digest,
        patches=[patch.name for patch in release.patches.patches],
        files={
            path: {"base": blob_id(plan.base[path]), "applied": blob_id(data)}
            for path, data in sorted(plan.patched.items())
        },
        overlay={path: blob_id(data) for path, data in sorted(release.overlay.items())},
        kernels=kept,
        version=plan.version,
    )
    gone = sorted(set(plan.seen) - set(wanted) - {MANIFEST})
    changes = [Change(path, plan.seen[path], None) for path in gone]
    changes += [Change(path, plan.seen[path], data) for path, data in wanted.items()]
    return [*changes, Change(MANIFEST, plan.seen[MANIFEST], manifest.encode())]


def revert_changes(tree: Tree, manifest: Manifest, patches: PatchSet | None = None) -> list[Change]:
    """Touched files back to their originals, our own files gone, the manifest last.

    Needs the tree and its manifest only. Files of another release that was put over the patched one never get the
    originals: they lose the patches where they have them, and are left as they are otherwise. `patches` are this
    checkout's, where it has them and none are given.
    """
    patches = patches or known_patches(CHECKOUT, manifest.pin)
    another = another_release(tree, manifest, patches)
    changes, left = [], []
    for path, blobs in manifest.files.items():
        now = tree.read(path)
        blob = None if now is None else blob_id(now)
        if blob == blobs["base"]:
            continue
        if blob == blobs["applied"] or not another:
            changes.append(Change(path, now, original(tree, path, blobs["base"])))
        elif (without := without_patches(tree, path, patches)) is not None:
            changes.append(Change(path, now, without))
        else:
            left.append(path)
    if left:
        note(f"left as they are, for they belong to another release than the patched one: {', '.join(left)}")
    changes += [Change(path, tree.read(path), None) for path in _ours(manifest)]
    return changes + [Change(MANIFEST, tree.read(MANIFEST), None)]


def refuse_edits(tree: Tree, state: State) -> None:
    """DriftError where the user changed patched or overlay files, or changed the release under them."""
    if state.foreign:
        raise DriftError(
            "another release of SGLang was put over the patched one; nothing was changed. "
            f"`{command_line(tree, 'revert --force')}` removes {HOME} and leaves the files of that release as they are",
            [str(item) for item in state.foreign],
        )
    if state.edits:
        raise DriftError(
            "these files were edited since they were applied; nothing was changed. "
            f"`{command_line(tree, 'refresh')}` brings edits into the patches, "
            f"`{command_line(tree, 'revert --force')}` keeps copies of them and takes all out; or undo them by hand",
            [str(item) for item in state.edits],
        )


def originals(tree: Tree, manifest: Manifest | None) -> dict[str, bytes]:
    """The release's content of every file the manifest lists, as kept at apply time."""
    if manifest is None:
        return {}
    return {path: original(tree, path, blobs["base"]) for path, blobs in manifest.files.items()}


def forked(release: Release, manifest: Manifest | None) -> list[str]:
    """Touched files that were not the release's when they were patched: by --force or --3way, in somebody's fork."""
    files = manifest.files if manifest else {}
    return sorted(path for path, blobs in files.items() if release.pin.blobs.get(path, blobs["base"]) != blobs["base"])


def original(tree: Tree, path: str, blob: str) -> bytes:
    """A touched file as it was before it was patched. DriftError where the tree's copy of it is gone or damaged."""
    data = tree.read(f"{ORIGINALS}/{blob}")
    if data is None or blob_id(data) != blob:
        raise DriftError(
            f"the kept original of {path} ({ORIGINALS}/{blob}) is missing or damaged; "
            f"restore {path} from the release and delete {HOME}"
        )
    return data


def _ours(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return []
    kept = sorted({f"{ORIGINALS}/{blobs['base']}" for blobs in manifest.files.values()})
    return [*manifest.overlay, *kept, *([LIBRARY] if manifest.kernels else [])]


def _require_exact(tree: Tree, release: Release, state: State, pristine: Read, fetch: bool) -> None:
    """DriftError where a hunk is not exact: of a tree that is no release the report that check has."""
    try:
        apply_patches(release.patches, pristine)
    except DriftError:
        if not state.unknown:
            raise
        drift = examine(tree, release, state, fetch)
        raise DriftError(
            f"--force takes exact hunks alone, and some are not; nothing was changed. As for the patches, {drift.way}",
            drift.lines(),
            drift.as_json(),
        ) from None


def _require_identity(tree: Tree, release: Release, state: State, anyway: bool, fetch: bool) -> None:
    in_the_way = [reason for reason in state.reasons if reason.startswith(f"{HOME}/")]
    if in_the_way:
        raise DriftError(f"{tree.package / HOME} holds files that apply did not put there; move them away", in_the_way)
    if state.ours:
        ways = " and ".join(f"`{command}`" for _, command in ways_back(tree, release, state))
        raise DriftError(
            f"{tree.package} is patched by treeverify, but its folder {HOME} is gone, and the kept originals with it; "
            f"take the patches out with {ways}, then run the command again",
            state.ours,
        )
    if not state.unknown or anyway:
        return
    drift = examine(tree, release, state, fetch)
    differ = f"{len(state.unknown)} of {len(release.pin.blobs)} files differ"
    raise DriftError(
        f"{tree.package} is not {release.pin.name} as released: {differ}; nothing was changed. "
        f"As for the patches, {drift.way}",
        drift.lines(),
        drift.as_json(),
    )
