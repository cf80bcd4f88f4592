# SPDX-License-Identifier: Apache-2.0
"""The journal alone, killed at every single step of a change, and at every step of the heal after that."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from applier.errors import DriftError
from applier.journal import MARK, Change, carry_out, heal, owned, pending
from applier.layout import HOME, JOURNAL, MANIFEST
from applier.tree import Tree, locate
from checkout import tree_hash

CHANGES = [
    Change(f"{HOME}/__init__.py", None, b"new\n"),
    Change(f"{HOME}/deep/er/ops.py", None, b"new too\n" * 500),
    Change("srt/a.py", b"old a\n", b"new a\n"),
    Change("srt/b.py", b"old b\n", b"new b\n" * 300),
    Change("srt/sub/c.py", b"old c\n", b""),
    Change(MANIFEST, None, b"{}\n"),
]
BACK = [Change(change.path, change.new, change.old) for change in CHANGES]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    package = tmp_path / "sglang"
    (package / "srt/sub").mkdir(parents=True)
    (package / "__init__.py").touch()
    for change in CHANGES:
        if change.old is not None:
            (package / change.path).write_bytes(change.old)
    return locate(package)


@contextmanager
def counting(left: int) -> Iterator[Callable[[], int]]:
    """Kills this process at the n-th disk operation; a kill at a flush leaves half of the file."""
    state = {"left": left}

    def step() -> None:
        if state["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state["left"] -= 1

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            step()
            return function(*arguments, **options)

        return wrapper

    saved = {name: getattr(os, name) for name in ("replace", "unlink", "mkdir", "rmdir", "chmod", "fsync")}

    def fsync(descriptor: int) -> None:
        if state["left"] == 0 and os.path.isfile(f"/proc/self/fd/{descriptor}"):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        step()
        saved["fsync"](descriptor)

    for name, function in saved.items():
        setattr(os, name, counted(function))
    os.fsync = fsync
    try:
        yield lambda: left - state["left"]
    finally:
        for name, function in saved.items():
            setattr(os, name, function)


def in_child(work: Callable[[], object], step: int) -> bool:
    """Runs `work` in a process of its own, killed at `step`; True where it was killed, False where it ended first."""
    child = os.fork()
    if child == 0:
        try:
            with counting(step):
                work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(("there", "back"), [(CHANGES, BACK), (BACK, CHANGES)], ids=["apply", "revert"])
def test_killed_at_every_step(tree: Tree, there: list[Change], back: list[Change]) -> None:
    if there is BACK:
        carry_out(tree, CHANGES)
    before = tree_hash(tree.package)
    carry_out(tree, there)
    after = tree_hash(tree.package)
    carry_out(tree, back)
    assert tree_hash(tree.package) == before

    seen = set()
    step = 0
    while in_child(lambda: carry_out(tree, there), step):
        done = heal(tree)
        now = tree_hash(tree.package)
        assert now == (after if done == "finished" else now) and now in (before, after), f"step {step}"
        seen.add(done)
        if now == after:
            carry_out(tree, back)
        step += 1
    assert step > 30
    assert seen == {None, "rolled back", "finished"}
    assert tree_hash(tree.package) == after


def test_killed_while_healing(tree: Tree) -> None:
    before = tree_hash(tree.package)
    with counting(10_000) as used:
        carry_out(tree, CHANGES)
        steps = used()
    carry_out(tree, BACK)
    crash = 0
    while True:
        assert in_child(lambda: carry_out(tree, CHANGES), steps * 2 // 3)
        assert pending(tree)
        killed = in_child(lambda: heal(tree), crash)
        heal(tree)
        assert tree_hash(tree.package) == before, f"step {crash} of the heal"
        if not killed:
            break
        crash += 1
    assert crash > 5


def test_files_changed_meanwhile_stop_the_run(tree: Tree) -> None:
    (tree.package / "srt/b.py").write_bytes(b"somebody else's\n")
    before = tree_hash(tree.package)
    with pytest.raises(DriftError):
        carry_out(tree, CHANGES)
    assert tree_hash(tree.package) == before


def test_a_write_that_fails_is_taken_back(tree: Tree) -> None:
    """A file size limit makes one of the writes fail for real, as a full disk would."""
    before = tree_hash(tree.package)
    big = [*CHANGES[:3], Change("srt/b.py", b"old b\n", b"x" * 100_000), *CHANGES[4:]]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(OSError, match="File too large"):
            carry_out(tree, big)
        assert tree_hash(tree.package) == before

    assert not in_child(limited, 100_000)
    assert tree_hash(tree.package) == before


def test_interrupted_by_hand_is_taken_back_at_once(tree: Tree) -> None:
    """Ctrl-C between two files: no second command is needed."""
    before = tree_hash(tree.package)

    def interrupted() -> None:
        plain, calls = os.replace, iter(range(100))

        def replace(*arguments: Any) -> None:
            plain(*arguments)
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        os.replace = replace  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            carry_out(tree, CHANGES)
        assert tree_hash(tree.package) == before

    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not in_child(interrupted, 100_000)
    assert tree_hash(tree.package) == before and not pending(tree)


def test_remains_without_a_plan_are_swept(tree: Tree) -> None:
    before = tree_hash(tree.package)
    folder = tree.package / JOURNAL
    folder.mkdir(parents=True)
    folder.chmod(0o755 | MARK)
    (folder / "0123").write_bytes(b"half")
    assert heal(tree) is None
    assert tree_hash(tree.package) == before


def test_heal_leaves_other_peoples_files(tree: Tree) -> None:
    (tree.package / HOME).mkdir()
    (tree.package / HOME / "theirs.py").touch()
    heal(tree)
    assert (tree.package / HOME / "theirs.py").exists()
    shutil.rmtree(tree.package / HOME)


@pytest.mark.parametrize("files", [[], ["_journal/notes.txt"], ["__pycache__/theirs.pyc", "sub/__pycache__/x.pyc"]])
def test_heal_leaves_a_folder_that_is_not_ours(tree: Tree, files: list[str]) -> None:
    """Empty, with byte code, or with a journal of somebody else's: no manifest and no mark, so nothing is touched."""
    (tree.package / HOME / "empty").mkdir(parents=True)
    for name in files:
        path = tree.package / HOME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    before = tree_hash(tree.package)
    assert heal(tree) is None
    assert tree_hash(tree.package) == before


def test_no_kill_leaves_our_folder_without_a_mark(tree: Tree) -> None:
    """Whenever our folder is there, the manifest or the journal's mark is: what `heal` sweeps is known to be ours."""
    for changes in (CHANGES, BACK):
        step = 0
        while in_child(lambda now=changes: carry_out(tree, now), step):  # type: ignore[misc]
            assert owned(tree) or not (tree.package / HOME).exists(), f"step {step}"
            heal(tree)
            home = tree.package / HOME
            assert not home.exists() or not home.stat().st_mode & MARK
            if (tree.package / MANIFEST).exists() is (changes is CHANGES):
                carry_out(tree, BACK if changes is CHANGES else CHANGES)
            step += 1
        assert step > 30


def interrupted(tree: Tree) -> Path:
    """A run killed among its replaces, srt/a.py's done; gives the journal's folder."""
    step = 10
    assert in_child(lambda: carry_out(tree, CHANGES), step)
    while not pending(tree) or (tree.package / "srt/a.py").read_bytes() != b"new a\n":
        heal(tree)
        step += 1
        assert in_child(lambda: carry_out(tree, CHANGES), step)
    assert not (tree.package / MANIFEST).exists()
    return tree.package / JOURNAL


BROKEN = [b"", b"{", b"[]", b"{}", b'{"changes": 1}', b'{"changes": [1]}', b'{"changes": [{"path": "srt/a.py"}]}']
BROKEN += [
    b"\xff",
    b'{"changes": [{"path": 1, "old": null, "new": null}]}',
    b'{"changes": [{"path": "a", "old": 1, "new": ""}]}',
]


@pytest.mark.parametrize("plan", BROKEN)
def test_a_broken_plan_is_told_and_left(tree: Tree, plan: bytes) -> None:
    (interrupted(tree) / "plan.json").write_bytes(plan)
    before = tree_hash(tree.package)
    with pytest.raises(DriftError, match=r"damaged: plan.json can't be read .* delete .*srt/treeverify"):
        heal(tree)
    assert tree_hash(tree.package) == before


def test_a_journal_without_the_old_contents_is_told_and_left(tree: Tree) -> None:
    folder = interrupted(tree)
    (copy,) = (path for path in folder.glob("*.old") if path.read_bytes() == b"old a\n")
    copy.write_bytes(b"torn")
    before = tree_hash(tree.package)
    with pytest.raises(DriftError, match="is missing") as refused:
        heal(tree)
    assert refused.value.details == ["srt/a.py"]
    assert tree_hash(tree.package) == before


def test_a_folder_that_is_mounted_from_elsewhere(tree: Tree) -> None:
    """No rename leads from the journal into it; the file is copied, and both ways it is all there."""
    mounted = tree.package / "srt/sub"
    mount = ["unshare", "--mount", "sh", "-c"]
    trial = [*mount, f"mount -t tmpfs t {mounted}"]
    if shutil.which("unshare") is None or subprocess.run(trial, check=False).returncode:
        pytest.skip("mounting takes root, unshare and mount")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom applier.journal import carry_out\nfrom applier.tree import locate\n"
        "from checkout import tree_hash\nfrom test_journal import BACK, CHANGES\n"
        f"tree = locate(Path({str(tree.package)!r}))\nbefore = tree_hash(tree.package)\n"
        "assert carry_out(tree, CHANGES)\n"
        "assert all(tree.read(change.path) == change.new for change in CHANGES)\n"
        "assert carry_out(tree, BACK) and tree_hash(tree.package) == before\n"
    )
    moved = tree.package / "c.py"
    script = f'cp {mounted}/c.py {moved} && mount -t tmpfs t {mounted} && mv {moved} {mounted} && "$@"'
    command = [*mount, script, "sh", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert run.returncode == 0, run.stderr
