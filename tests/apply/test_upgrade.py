# SPDX-License-Identifier: Apache-2.0
"""Another release of SGLang put over a patched one, as pip and git do it: our folder stays, the files change."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from applier.journal import carry_out
from applier.layout import HOME
from applier.manifest import load_manifest
from applier.patchset import apply_patches, load_patches, take_out
from applier.pin import Pin, load_pin
from applier.plan import refuse_edits, revert_changes
from applier.state import inspect_recorded
from applier.tree import locate
from checkout import ALPHA, BETA, Checkout, tree_hash

VERSIONS = [("0.5.12.post1", "0.5.8"), (None, None)]
KINDS = ["pip", "git checkout -f"]
OTHER_ALPHA = "# rewritten\n" + ALPHA.replace("size", "length").replace("self.indptr[: bs + 1]", "self.indptr[:bs]")
OTHER_BETA = BETA.replace("line 5\n", "line V\n").replace("line 30\n", "line XXX\n")


def version(checkout: Checkout, text: str | None) -> None:
    path = checkout.package / "_version.py"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(f"__version__ = version = '{text}'\n")


def put_over(checkout: Checkout, **files: str) -> None:
    """Other contents of the touched files, by rename as an installer does it."""
    for name, text in files.items():
        new = checkout.package / "srt/new"
        new.write_text(text)
        new.replace(checkout.package / f"srt/{name}.py")


def release_of(checkout: Checkout) -> str:
    """Hash of the package without our folder."""
    copy = checkout.root.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkout.package, copy)
    shutil.rmtree(copy / HOME, ignore_errors=True)
    return tree_hash(copy)


def status(checkout: Checkout) -> dict[str, Any]:
    run = checkout.run("status", "--json")
    assert "Traceback" not in run.stderr
    return dict(json.loads(run.stdout))


@pytest.mark.parametrize("versions", VERSIONS, ids=KINDS)
def test_another_release_is_left_alone(checkout: Checkout, versions: tuple[str | None, str | None]) -> None:
    version(checkout, versions[0])
    checkout.run("apply", "--no-build")
    version(checkout, versions[1])
    put_over(checkout, alpha=OTHER_ALPHA, beta=OTHER_BETA)
    other = release_of(checkout)

    found = status(checkout)
    assert found["state"] == "drifted"
    assert "another release of SGLang" in str(found["reasons"]) and "--force" in str(found["advice"])
    for command in (["revert"], ["apply", "--no-build"], ["apply", "--no-build", "--force"]):
        refused = checkout.run(*command)
        assert refused.returncode == 1 and "another release of SGLang" in refused.stderr
        assert release_of(checkout) == other


@pytest.mark.parametrize("versions", VERSIONS, ids=KINDS)
def test_forced_revert_takes_only_our_folder_away(checkout: Checkout, versions: tuple[str | None, str | None]) -> None:
    version(checkout, versions[0])
    checkout.run("apply", "--no-build")
    version(checkout, versions[1])
    put_over(checkout, alpha=OTHER_ALPHA)
    (checkout.package / "srt/beta.py").unlink()  # the other release doesn't have it
    other = release_of(checkout)
    run = checkout.run("revert", "--force")
    assert run.returncode == 0, run.stderr
    assert tree_hash(checkout.package) == other
    assert "left as they are" in run.stderr and "srt/alpha.py" in run.stderr and "srt/beta.py" in run.stderr
    assert status(checkout)["state"] == "drifted", "not called the pin's release"


def test_a_file_that_still_is_ours_is_reverted(checkout: Checkout) -> None:
    """An upgrade that was killed half-way."""
    version(checkout, "0.5.12.post1")
    checkout.run("apply", "--no-build")
    version(checkout, "0.5.8")
    put_over(checkout, alpha=OTHER_ALPHA)
    assert checkout.run("revert", "--force").returncode == 0
    assert (checkout.package / "srt/alpha.py").read_text() == OTHER_ALPHA
    assert (checkout.package / "srt/beta.py").read_text() == BETA
    assert not (checkout.package / HOME).exists()


def test_the_same_release_with_edits_is_edited(checkout: Checkout) -> None:
    """Even where nothing of a patch is left in a file."""
    version(checkout, "0.5.12.post1")
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    put_over(checkout, alpha=OTHER_ALPHA)
    assert status(checkout)["state"] == "edited"
    assert checkout.run("revert", "--force").returncode == 0
    assert tree_hash(checkout.package) == clean
    assert (checkout.root / "build/edits-1/srt/alpha.py").read_text() == OTHER_ALPHA


def test_patches_carried_into_another_release_are_taken_out(checkout: Checkout) -> None:
    version(checkout, "0.5.12.post1")
    checkout.run("apply", "--no-build")
    beta = checkout.package / "srt/beta.py"
    version(checkout, "0.5.13")
    put_over(checkout, beta=beta.read_text() + "line 41\n")
    assert checkout.run("revert", "--force").returncode == 0
    assert beta.read_text() == BETA + "line 41\n"
    assert (checkout.package / "srt/alpha.py").read_text() == ALPHA


def test_a_reinstall_of_the_same_release_is_no_other_one(checkout: Checkout) -> None:
    version(checkout, "0.5.12.post1")
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    put_over(checkout, alpha=ALPHA, beta=BETA)
    assert status(checkout)["state"] == "partial"
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == clean


def test_a_manifest_of_an_older_checkout_is_read(checkout: Checkout) -> None:
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    path = checkout.package / HOME / "_manifest.json"
    old = json.loads(path.read_text())
    del old["version"]
    path.write_text(json.dumps({**old, "of a newer checkout": 1}))
    assert status(checkout)["state"] == "applied"
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == clean


def test_reverting_needs_the_tree_and_its_manifest_only(checkout: Checkout) -> None:
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    shutil.rmtree(checkout.root / "patches")
    tree = locate(checkout.package)
    manifest = load_manifest(tree)
    assert manifest is not None
    state = inspect_recorded(tree, manifest)
    assert state.state == "applied" and not state.edits
    refuse_edits(tree, state)
    carry_out(tree, revert_changes(tree, manifest))
    assert tree_hash(checkout.package) == clean


def test_what_patches_do_can_be_taken_out(checkout: Checkout) -> None:
    patches = load_patches(load_pin(checkout.pin))
    base = {"srt/alpha.py": ALPHA.encode(), "srt/beta.py": BETA.encode()}
    patched = apply_patches(patches, base.get)
    assert {path: take_out(patches, path, data) for path, data in patched.items()} == base
    assert take_out(patches, "srt/alpha.py", base["srt/alpha.py"]) is None
    assert take_out(patches, "srt/gamma.py", b"") is None


def test_what_the_real_patches_do_can_be_taken_out(pin: Pin, stock_tree: Path) -> None:
    patches = load_patches(pin)
    base = {path: (stock_tree / "sglang" / path).read_bytes() for path in patches.touched}
    patched = apply_patches(patches, base.get)
    assert {path: take_out(patches, path, data) for path, data in patched.items()} == base


@pytest.mark.parametrize("git", [False, True], ids=["installed", "git"])
@pytest.mark.parametrize("command", [["apply", "--no-build"], ["check", "--force"]])
def test_our_folder_deleted_is_told_with_the_way_out(checkout: Checkout, git: bool, command: list[str]) -> None:
    """As `git clean -fd` does it: patched files stay, overlay and originals are gone."""
    if git:
        (checkout.package.parent / ".git").mkdir()
    stock = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    shutil.rmtree(checkout.package / HOME)
    found = status(checkout)
    assert found["state"] == "partial" and "its folder srt/treeverify is gone" in str(found["reasons"])
    before = tree_hash(checkout.package)
    refused = checkout.run(*command)
    assert refused.returncode == 1 and tree_hash(checkout.package) == before
    assert "is patched by treeverify, but its folder srt/treeverify is gone" in refused.stderr
    mend = f"python3 apply.py revert --sglang {checkout.package}"
    assert f"take the patches out with `{mend}`" in refused.stderr and "upstream" not in refused.stderr
    assert found["advice"][0]["command"] == mend
    assert checkout.run("revert").returncode == 0 and tree_hash(checkout.package) == stock
    assert checkout.run(*command).returncode == 0


def fork_that_committed(checkout: Checkout, *states: str) -> list[str]:
    """srt/beta.py in these states, a commit each; gives their ids. Our folder is not there."""
    git = ["git", "-C", str(checkout.package.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    commits = []
    for text in states:
        (checkout.package / "srt/beta.py").write_text(text)
        for arguments in (["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *arguments], check=True)
        commits.append(subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip())
    return commits


MINE = f"# a fork's\n{BETA}"
PATCHED = MINE.replace("line 5\n", "line five\n").replace("line 30\n", "line 30\nline 30 and a half\n")


def test_a_fork_that_committed_the_patches_gets_them_taken_out(checkout: Checkout) -> None:
    """`git checkout` of the file gives back what is there; the patches stand one line lower than in the release."""
    checkout.keep_wheel()
    second = checkout.pin / "0002-more.patch"
    second.write_text(second.read_text().replace("and a half", "of treeverify"))
    patched = PATCHED.replace("and a half", "of treeverify")
    fork_that_committed(checkout, MINE, patched)
    (way, _) = status(checkout)["advice"]
    assert way["command"] == f"python3 apply.py revert --force --sglang {checkout.package}"
    refused = checkout.run("revert")
    assert refused.returncode == 1 and way["command"] in refused.stderr and "git" not in refused.stderr
    run = checkout.run("revert", "--force")
    assert run.returncode == 0 and (checkout.package / "srt/beta.py").read_text() == MINE, run.stderr
    assert (checkout.root / "build/edits-1/srt/beta.py").read_text() == patched
    assert status(checkout)["state"] == "drifted"


@pytest.mark.parametrize("committed", [False, True], ids=["edited", "committed"])
def test_where_patches_cannot_be_taken_out_git_s_commit_is_named(checkout: Checkout, committed: bool) -> None:
    other = f"{PATCHED}# treeverify\n"
    first, *_ = fork_that_committed(checkout, MINE, *([other, f"{other}#\n"] if committed else []))
    if not committed:
        (checkout.package / "srt/beta.py").write_text(other)
    (way, _) = status(checkout)["advice"]
    commit = f" {first[:12]}" if committed else ""
    assert way["command"] == f"git -C {checkout.package.parent} checkout{commit} -- sglang/srt/beta.py"
    subprocess.run(shlex.split(way["command"]), check=True, capture_output=True)
    assert (checkout.package / "srt/beta.py").read_text() == MINE and status(checkout)["state"] == "drifted"


def test_a_fork_that_never_was_without_the_patches_is_sent_to_the_release(checkout: Checkout) -> None:
    fork_that_committed(checkout, f"{PATCHED}# treeverify\n")
    (way, _) = status(checkout)["advice"]
    assert way["command"] == "python3 -m pip download --no-deps sglang==1.0" and "sglang/srt/beta.py" in way["text"]
