# SPDX-License-Identifier: Apache-2.0
"""The commands. Each gives its exit code and raises ApplierError for the rest."""

from __future__ import annotations

import os
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from applier import journal
from applier.advice import advice
from applier.arch import OLDEST, choose_arches, found_gpus, runs_on, sort_arches
from applier.bootstrap import ORIGINAL, provide_command
from applier.checkoutfiles import make_folder
from applier.drift import fit_lines
from applier.errors import DriftError, UsageError
from applier.fit import CLEAN
from applier.gitinfo import commit_note
from applier.journal import Change
from applier.keep import put_aside
from applier.kernels import Built, build, sources_digest
from applier.layout import CHECKOUT, HOME
from applier.line_ends import crlf_note
from applier.lock import locked
from applier.manifest import Kernels, load_manifest
from applier.nearest import closest_pin, pin_of
from applier.obtain import made_tree, make_tree
from applier.pin import Pin, choose_pin, load_pin, load_pins
from applier.plan import Plan, apply_changes, plan_apply, refuse_edits, revert_changes
from applier.port import plan_port, require_stock
from applier.portreport import report, summary
from applier.refresh import Refresh, Wish, refresh_tree
from applier.release import Release, load_release
from applier.released import released_file
from applier.requirements import allows
from applier.restoring import removable
from applier.say import note, result, result_json
from applier.settling import REPORT, to_settle, unsettled
from applier.show import list_json, list_text, status_text, ways_text
from applier.state import EXIT_OK, State, inspect, inspect_recorded
from applier.text import width, wrapped
from applier.tree import Tree, locate

SERVER_NEEDS = ["torch", "transformers", "sgl_kernel", "flashinfer"]
"""Stands for SGLang's dependencies."""


@dataclass(frozen=True)
class Target:
    """A tree, the release it is held against, and what it is at the moment."""

    tree: Tree
    release: Release
    state: State


def apply(options: Namespace) -> int:
    """Everything in memory first, kernels into build/, then one journalled write."""
    if not options.no_build and (options.arch or (options.sglang is None and not _has_made_tree(options))):
        choose_arches(options.arch)  # says what is wrong before anything is fetched
    target = _target(options, make=True)
    _require_writable(target)
    with _writing(target.tree):  # what was seen so far may have been another run's half-way state
        target = _inspected(target.tree, target.release.pin)
        plan = _planned(target, options)
    kernels = _kernels(options, target.state)
    with _writing(target.tree):
        changed = journal.carry_out(target.tree, apply_changes(target.release, plan, kernels))
    _say_applied(target, plan, kernels, changed)
    return 0


def check(options: Namespace) -> int:
    """What apply does before it compiles and writes."""
    target = _target(options)
    plan = _planned(target, options, fetch=True)
    _require_writable(target)
    if options.json:
        result_json(
            {
                "ok": True,
                "pin": target.release.pin.name,
                "tree": str(target.tree.package),
                "state": target.state.state,
                "patches": [patch.as_json() for patch in plan.fit.patches],
                "files": sorted(plan.patched),
            }
        )
    else:
        count = len(target.release.patches.patches)
        result(f"{target.tree.package} is {target.state.state}; {count} patches of {target.release.pin.name} fit")
        if plan.fit.state != CLEAN:
            for line in fit_lines(plan.fit, target.release.pin):
                result(f"  {line}")
    return 0


def status(options: Namespace) -> int:
    """What a tree is; 0 for clean and applied."""
    target = _target(options)
    state = target.state
    ways = advice(target.tree, target.release, state, _where(target))
    if options.json:
        open_points = unsettled(target.release.pin.folder)
        told = {**state.as_json(), "tree": str(target.tree.package), "to_settle": open_points}
        result_json({**told, "advice": [vars(way) for way in ways]})
    else:
        result(status_text(str(target.tree.package), state, target.release, ways))
    return 0 if state.state in EXIT_OK else 1


def revert(options: Namespace) -> int:
    """The release again, byte for byte; needs the tree and its manifest only."""
    tree = locate(_folder(options))
    with _writing(tree, partial(put_aside, tree) if options.force else None):
        manifest = load_manifest(tree)
        if manifest is None:
            found = _inspected(tree, closest_pin(tree, load_pins(CHECKOUT)))
            if out := removable(tree, found.release, found.state, options.force):
                return _take_out(found, out)
            if found.state.state != "clean":
                ways = advice(tree, found.release, found.state, _where(found)) if found.state.state == "partial" else []
                details = [*found.state.reasons, *ways_text(ways)[1:]]
                raise DriftError(f"{tree.package} has no manifest, so there is nothing to take back by", details)
            result(f"{tree.package}: nothing to revert")
            return 0
        state = inspect_recorded(tree, manifest)
        if not options.force:
            refuse_edits(tree, state)
        strays = [item.path for item in state.edits if item.expected is None]
        changes = [*revert_changes(tree, manifest), *(Change(path, tree.read(path), None) for path in strays)]
        put_aside(tree, [item.path for item in state.edits])
        journal.carry_out(tree, changes)
    kept = f", all but {len(state.foreign)} of another release" if state.foreign else ""
    result(f"{tree.package}: reverted, {len(manifest.files)} files as they were{kept}")
    return 0


def _take_out(target: Target, out: dict[str, bytes]) -> int:
    """Files of a tree without a manifest, without the patches; 1 where that was not all of it."""
    tree = target.tree
    put_aside(tree, [path for path in out if path not in target.state.ours])
    journal.carry_out(tree, [Change(path, tree.read(path), data) for path, data in out.items()])
    result(f"{tree.package}: the patches taken out of {len(out)} {'file' if len(out) == 1 else 'files'}")
    left = _inspected(tree, target.release.pin)
    if left.state.state == "partial":
        details = [*left.state.reasons, *ways_text(advice(tree, left.release, left.state, _where(left)))[1:]]
        raise DriftError(f"{tree.package} is not whole yet", details)
    return 0


def refresh(options: Namespace) -> int:
    """Edits of a patched tree, back into patches and overlay; then the tree is what apply would make."""
    tree = locate(_folder(options))
    with _writing(tree), locked(CHECKOUT.patches, waiting=note):
        wish = Wish(options.patch, tuple(options.add), options.drop_empty)
        pin, plan = refresh_tree(CHECKOUT, tree, wish, options.pin, options.dry_run)
    if options.json:
        result_json({"ok": True, "pin": pin.name, "dry_run": options.dry_run, **plan.as_json()})
    else:
        _say_refreshed(plan, pin, options.dry_run)
    return 0


def port(options: Namespace) -> int:
    """A new pin's folder from an old pin and another release; 1 where something is left to settle."""
    provide_command("git", "git", "port")
    release = load_release(CHECKOUT, choose_pin(CHECKOUT, options.source))
    tree = locate(options.to, "--to")
    require_stock(tree, load_manifest(tree) is not None)
    old = release.pin
    plan = plan_port(release, tree, options.name, lambda path: released_file(tree, old, path), report)
    target = CHECKOUT.patches / plan.name
    with locked(CHECKOUT.patches, waiting=note):
        make_folder(target, plan.files, lambda folder: load_release(CHECKOUT, load_pin(folder)))
    if options.json:
        result_json({"ok": plan.open == 0, "folder": str(target), **plan.as_json()})
    else:
        result(f"{target}: started from {old.name}")
        for line in summary(plan):
            result("\n".join(wrapped(line, "  ", "    ")))
        result(f"  {f'{to_settle(plan.open)}: see {target / REPORT}' if plan.open else 'nothing to settle'}")
    return 1 if plan.open else 0


def list_pins(options: Namespace) -> int:
    """Pins and their patches."""
    releases = [load_release(CHECKOUT, pin) for pin in load_pins(CHECKOUT)]
    if options.json:
        result_json(list_json(releases))
    else:
        result(list_text(releases))
    return 0


def build_kernels(options: Namespace) -> int:
    """Kernels only, into build/."""
    from applier.tables import kernel_table

    built = build(CHECKOUT, choose_arches(options.arch), options.debug)
    if options.json:
        result_json(built.kernels)
    else:
        result(kernel_table(built.kernels))
        note(str(built.library))
    return 0


def doctor(options: Namespace) -> int:
    """What this machine has, and what to mend."""
    from applier.doctor import examine
    from applier.doctor_text import render

    target = _any_target(options)
    tree, state = (target.tree, target.state) if target else (None, None)
    report = examine(CHECKOUT, tree, state, _where(target) if target else "", options.python)
    if options.json:
        result_json(report)
    else:
        result(render(report))
    return 1 if report["mend"] else 0


def selftest(options: Namespace) -> int:
    """The kernels on the user's own card against the reference."""
    if not found_gpus():
        raise UsageError(
            "selftest needs a GPU and nvidia-smi finds none; run it on the machine that serves (doctor says more)"
        )
    target = _applied(options)
    require_python(options.python, target.release.pin, ["torch"])
    return _become(options, target.tree, ["-m", "sglang.srt.treeverify.selftest", *options.arguments])


def serve(options: Namespace) -> int:
    """The patched server with the arguments given."""
    target = _applied(options, finished=True)
    require_python(options.python, target.release.pin, SERVER_NEEDS)
    return _become(options, target.tree, ["-m", "sglang.launch_server", *options.arguments])


def _require_writable(target: Target) -> None:
    if not os.access(target.tree.package / "srt", os.W_OK):
        raise UsageError(f"{target.tree.package} is not writable for you; apply as its owner")


def _has_made_tree(options: Namespace) -> bool:
    return made_tree(CHECKOUT, choose_pin(CHECKOUT, options.pin)).exists()


def _folder(options: Namespace) -> Path:
    """Where the tree that is meant lies."""
    folder: Path = options.sglang or made_tree(CHECKOUT, choose_pin(CHECKOUT, options.pin))
    if options.sglang is None and not folder.exists():
        raise UsageError(f"no tree yet: `apply.py apply` makes {folder}, or give one with --sglang")
    return folder


def _target(options: Namespace, make: bool = False) -> Target:
    """The tree that is meant, settled where a run was interrupted, and its state."""
    pin = choose_pin(CHECKOUT, options.pin) if options.pin or options.sglang is None else None
    folder = make_tree(CHECKOUT, pin) if make and pin and options.sglang is None else _folder(options)
    tree = locate(folder)
    _settle(tree)
    target = _inspected(tree, pin or pin_of(tree, CHECKOUT))
    if target.state.unknown and (line := crlf_note(tree, target.release.pin)):
        note(line)
    return target


def _inspected(tree: Tree, pin: Pin) -> Target:
    release = load_release(CHECKOUT, pin)
    return Target(tree, release, inspect(tree, release, sources_digest(CHECKOUT)))


def _settle(tree: Tree) -> None:
    """A crashed run is taken back or finished, whatever command comes next."""
    if tree.path(HOME).exists() and os.access(tree.package / "srt", os.W_OK):
        with _writing(tree):
            pass


@contextmanager
def _writing(tree: Tree, keep: Callable[[list[str]], object] | None = None) -> Iterator[None]:
    """The tree's lock, with whatever a crashed run left settled; `keep` as `journal.heal` has it."""
    with locked(tree.package / "srt", waiting=note):
        if done := journal.heal(tree, keep):
            note(f"an interrupted run on {tree.package} was {done}")
        yield


def _planned(target: Target, options: Namespace, fetch: bool = False) -> Plan:
    plan = plan_apply(target.tree, target.release, target.state, options.force, options.three_way, fetch)
    if line := commit_note(target.tree, target.release.pin):
        note(f"note: {line}")
    return plan


def _kernels(options: Namespace, state: State) -> Built | Kernels | None:
    """A library for the wanted architectures: the tree's own where it is up to date, else a new one."""
    recorded = state.manifest.kernels if state.manifest else None
    current = recorded if recorded and set(state.kernels.values()) == {"built"} else None
    if options.no_build:
        if recorded and not current:
            note("the tree's kernels are out of date and --no-build was given: they are removed")
        return current
    arches = choose_arches(options.arch, recorded.arches if recorded else None)
    if current and set(arches) <= set(current.arches):
        return current
    kept = set(recorded.arches) - set(arches) if recorded else set()
    if kept:
        note(f"note: the tree keeps its kernels for sm_{', sm_'.join(sort_arches([*kept]))} too (revert drops them)")
    return build(CHECKOUT, sort_arches([*kept, *arches]))


def _say_applied(target: Target, plan: Plan, kernels: Built | Kernels | None, changed: bool) -> None:
    pin, package = target.release.pin, target.tree.package
    if not changed:
        result(f"{package}: already patched with {pin.name}, nothing to do")
        return
    arches = ", ".join(f"sm_{arch}" for arch in kernels.arches) if kernels else "none (--no-build)"
    result(f"{package}: patched for {pin.name}")
    result(f"  {len(target.release.patches.patches)} patches in {len(plan.patched)} files, kernels: {arches}")
    state = _inspected(target.tree, pin).state
    result("\n".join(ways_text(advice(target.tree, target.release, state, _where(target)))[1:]))


def _say_refreshed(plan: Refresh, pin: Pin, dry_run: bool) -> None:
    if not plan.writes:
        result(f"{pin.name}: nothing to refresh")
    for item in plan.taken:
        line = f"{item.path}:{item.line} -> {item.into} ({item.why})"
        result(line if len(line) <= width() else f"{item.path}:{item.line}\n  -> {item.into} ({item.why})")
    for path, data in sorted(plan.writes.items()):
        verb = "removed" if data is None else "written"
        result(f"  {'would be ' if dry_run else ''}{verb}: {path}")
    for line in unsettled(pin.folder):
        note(f"still to settle: {line}")
    for name in plan.empty:
        note(f"{name} became empty: it is out of the series, and what its header says goes with it")
    if plan.left:
        note(
            f"not taken in, for missing or for older than the patches; `apply.py apply` brings: {', '.join(plan.left)}"
        )
    if plan.ignored:
        note(f"hidden files are no part of an overlay and were left: {', '.join(plan.ignored)}")


def _where(target: Target) -> str:
    """What tells a further command that this tree is meant, ready to paste; nothing for the tree made by default."""
    package, pin = target.tree.package, target.release.pin
    if package != made_tree(CHECKOUT, pin) / "python" / "sglang":
        return f" --sglang {shlex.quote(str(package))}"
    return "" if pin.name == choose_pin(CHECKOUT, None).name else f" --pin {shlex.quote(pin.name)}"


def _applied(options: Namespace, finished: bool = False) -> Target:
    """A tree that can serve here: patched, with kernels for every card that can have some; where asked, a whole pin."""
    target = _target(options)
    if finished and (open_points := unsettled(target.release.pin.folder)):
        raise DriftError(f"{target.release.pin.name} is no finished pin, so it does not serve yet", open_points)
    if target.state.state != "applied" or not target.state.kernels:
        what = target.state.state if target.state.state != "applied" else "applied without kernels"
        way_out = f"run `apply.py apply{_where(target)}` first"
        raise DriftError(f"{target.tree.package} is {what}; {way_out}", target.state.reasons)
    gpus = [gpu for gpu in found_gpus() if float(gpu.capability) >= OLDEST]
    unserved = sort_arches([gpu.arch for gpu in gpus if not any(runs_on(arch, gpu) for arch in target.state.kernels)])
    if unserved:
        raise DriftError(
            f"{target.tree.package} has kernels for sm_{', sm_'.join(target.state.kernels)}, none for this machine's "
            f"sm_{', sm_'.join(unserved)}; run `apply.py apply{_where(target)} --arch {','.join(unserved)}`"
        )
    return target


def _any_target(options: Namespace) -> Target | None:
    try:
        return _target(options)
    except UsageError:
        if options.sglang is not None:
            raise
        return None


def require_python(python: str, pin: Pin, modules: list[str]) -> None:
    """A line of advice where the user's Python lacks what SGLang imports; what follows will fail by itself.

    UsageError where it is a Python that the release is not for.
    """
    code = (
        "import importlib.util as u, platform, sys\n"
        "print(platform.python_version(), ', '.join(m for m in sys.argv[1:] if u.find_spec(m) is None), sep='\\n')"
    )
    try:
        found = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True, check=False)
    except OSError:
        return  # _become says so
    version, _, missing = found.stdout.partition("\n")
    if version and not allows(pin.requires_python, version):
        raise UsageError(
            f"{python} is Python {version}, sglang {pin.pypi} is for {pin.requires_python}: name another with --python"
        )
    if missing := missing.strip():
        note(
            f"{python} lacks {missing}. `{python} -m pip install sglang=={pin.pypi}` brings SGLang's dependencies (the "
            "patched tree still comes first); --python names another interpreter"
        )


def _become(options: Namespace, tree: Tree, arguments: list[str]) -> int:
    """Replaces this process with the user's Python, the patched tree first on its path."""
    here = Path.cwd() / "sglang"
    if here.is_dir() and here.resolve() != tree.package.resolve():
        raise UsageError(f"{here} would be run in place of {tree.package}: `python -m` looks here first; cd elsewhere")
    path = [str(tree.import_root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop(ORIGINAL, None)
    try:
        os.execvpe(options.python, [options.python, *arguments], environment)
    except OSError as error:
        raise UsageError(f"{options.python} does not run ({error.strerror}); name one with --python") from None
