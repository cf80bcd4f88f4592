# SPDX-License-Identifier: Apache-2.0
"""Trees that are out of the ordinary: links, line ends, modes, names that differ in case, very many files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from checkout import Checkout, tree_hash


def refused(checkout: Checkout, *arguments: str, code: int = 1) -> str:
    """A refusal that changes nothing; gives what it says."""
    before = tree_hash(checkout.package)
    run = checkout.run(*arguments)
    assert run.returncode == code and "Traceback" not in run.stderr, run.stdout + run.stderr
    assert tree_hash(checkout.package) == before
    return run.stderr


def round_trip(checkout: Checkout) -> str:
    """apply, status, revert: the tree is as before; gives the digest in between."""
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--no-build").returncode == 0
    applied = tree_hash(checkout.package)
    assert checkout.run("status").returncode == 0
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before
    return applied


@pytest.mark.parametrize("link", ["srt/beta.py", "srt", "srt/treeverify", "srt/treeverify/attention"])
def test_links_inside_the_package_are_not_followed(checkout: Checkout, link: str) -> None:
    """Not even those: a link would come back as a file, and two paths would be one file."""
    path = checkout.package / link
    elsewhere = checkout.package / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        path.parent.mkdir(exist_ok=True)
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    error = refused(checkout, "apply", "--no-build")
    assert f"{link}" in error and f"it leads to {elsewhere}" in error


def test_a_link_of_the_users_in_our_folder_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("apply", "--no-build")
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (checkout.package / "srt/treeverify/mine.txt").symlink_to(outside)
    for command in (["revert"], ["revert", "--force"], ["apply", "--no-build"]):
        assert "srt/treeverify/mine.txt leads out" in refused(checkout, *command)
    assert outside.read_text() == "mine"


def test_read_only_files_stay_read_only(checkout: Checkout) -> None:
    for path in checkout.package.rglob("*.py"):
        path.chmod(0o444)
    round_trip(checkout)


def test_files_that_share_an_inode_with_a_cache_are_not_written_through(checkout: Checkout, tmp_path: Path) -> None:
    """uv installs packages as hard links into its cache."""
    cache = tmp_path / "cache"
    for path in checkout.package.rglob("*.py"):
        copy = cache / path.relative_to(checkout.package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)
    before = tree_hash(cache)
    assert checkout.run("apply", "--no-build").returncode == 0
    assert tree_hash(cache) == before
    assert checkout.run("revert").returncode == 0
    assert tree_hash(cache) == before


def test_crlf_trees_are_told_apart_and_mended_by_the_line_printed(checkout: Checkout) -> None:
    """A checkout by a git that turns line ends: refused by apply and by --force; the advice gives a tree that works."""
    root = checkout.package.parents[1] / "fork"
    root.mkdir()
    (checkout.package.parent).rename(root / "python")
    checkout.package = root / "python/sglang"
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "release"], ["config", "core.autocrlf", "true"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run("git rm -rq --cached . && git reset -q --hard", shell=True, cwd=root, check=True)
    assert b"\r\n" in (checkout.package / "srt/beta.py").read_bytes()
    for force in ([], ["--force"]):
        error = refused(checkout, "apply", "--no-build", *force)
        assert "2 of 2 files are v1's but for their CRLF line ends" in error
    line = next(line for line in error.splitlines() if "autocrlf" in line)
    subprocess.run(line[line.index(": git ") + 2 :], shell=True, check=True)
    round_trip(checkout)


def test_a_release_with_crlf_of_its_own(checkout: Checkout) -> None:
    """Patches then have it too, in every line of that file."""
    beta = checkout.package / "srt/beta.py"
    beta.write_bytes(beta.read_bytes().replace(b"\n", b"\r\n"))
    checkout.write_pin()
    for patch in checkout.pin.glob("*.patch"):
        head, mark, hunks = patch.read_bytes().partition(b"+++ b/python/sglang/srt/beta.py\n")
        lines = hunks.splitlines(keepends=True)
        patch.write_bytes(head + mark + b"".join(x if x[:2] == b"@@" else x.replace(b"\n", b"\r\n") for x in lines))
    round_trip(checkout)
    assert b"line five\r\n" not in beta.read_bytes()


@pytest.mark.parametrize(
    ("shared", "own", "told"),
    [
        ("Ops.py", "", "attention/Ops.py and srt/treeverify/attention/ops.py are one file where case does not count"),
        ("", "attention/OPS.py", "attention/OPS.py and srt/treeverify/attention/ops.py are one file"),
        ("", "__init__.py/x.py", "__init__.py would be a file and the folder of srt/treeverify/__init__.py/x.py"),
        ("", "_Manifest.json", "only srt/treeverify/ may be added to, and not srt/treeverify/_manifest.json"),
        ("", "_ORIGINALS/x", "may be added to, and not"),
        ("", "a\\b.py", "holds a backslash"),
    ],
)
def test_overlay_files_that_can_not_be_everywhere_are_refused(
    checkout: Checkout, shared: str, own: str, told: str
) -> None:
    for path in (
        checkout.root / "overlay/srt/treeverify/attention" / shared if shared else None,
        checkout.pin / "overlay/srt/treeverify" / own if own else None,
    ):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x = 1\n")
    assert told in refused(checkout, "apply", "--no-build", code=2)


@pytest.mark.parametrize("path", ["srt/../../out.py", "srt/other.py", "top.py"])
def test_overlays_write_below_our_folder_only(checkout: Checkout, path: str) -> None:
    (checkout.root / "overlay/srt").mkdir(exist_ok=True)
    target = checkout.root / "overlay" / path
    target.write_text("x = 1\n")
    if target.resolve().is_relative_to(checkout.root / "overlay"):
        assert "only srt/treeverify/ may be added to" in refused(checkout, "apply", "--no-build", code=2)
    else:
        round_trip(checkout)
        assert not (checkout.package / path).exists()


def test_links_in_an_overlay_are_refused(checkout: Checkout) -> None:
    (checkout.root / "overlay/srt/treeverify/passwd").symlink_to("/etc/passwd")
    assert "passwd is a link" in refused(checkout, "apply", "--no-build", code=2)


def test_names_that_differ_in_case_are_other_files(checkout: Checkout) -> None:
    for name in ("srt/Alpha.py", "srt/TreeVerify/__init__.py", "SRT/alpha.py"):
        path = checkout.package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    if (checkout.package / "srt/treeverify").exists():
        pytest.skip("case does not count on this file system")
    round_trip(checkout)


def test_ten_thousand_files(checkout: Checkout) -> None:
    """Neither command looks at files that are no business of its."""
    for folder in range(100):
        (checkout.package / f"srt/folder{folder}").mkdir()
        for number in range(100):
            (checkout.package / f"srt/folder{folder}/file{number}.py").write_bytes(b"x = 1\n")
    before, used = tree_hash(checkout.package), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = [checkout.run(*command).returncode for command in (["apply", "--no-build"], ["status"], ["revert"])]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run == [0, 0, 0] and tree_hash(checkout.package) == before
    assert after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime < 3, "seconds of CPU time"


@pytest.mark.parametrize("where", ["files", "overlay", "journal"])
def test_a_manifest_or_journal_never_leads_out(checkout: Checkout, tmp_path: Path, where: str) -> None:
    """Whatever is written there: another file's name, a folder's, or none at all."""
    outside = tmp_path / "outside.py"
    outside.write_text("mine\n")
    checkout.run("apply", "--no-build")
    home = checkout.package / "srt/treeverify"
    manifest = json.loads((home / "_manifest.json").read_text())
    blobs = manifest["files"]["srt/alpha.py"]
    for path in ("../../../outside.py", str(outside), "srt/../../../outside.py", "a\0b", "x" * 300):
        if where == "journal":
            (home / "_journal").mkdir(exist_ok=True)
            changes = {"changes": [{"path": path, "old": blobs["base"], "new": None}]}
            (home / "_journal/plan.json").write_text(json.dumps(changes))
            (home / "_journal/0.old").write_bytes((home / "_originals" / blobs["base"]).read_bytes())
        else:
            more = {**manifest[where], path: blobs if where == "files" else blobs["base"]}
            (home / "_manifest.json").write_text(json.dumps({**manifest, where: more}))
        before = tree_hash(tmp_path / "site")
        for command in (["revert", "--force"], ["status"]):
            run = checkout.run(*command)
            assert run.returncode == 1 and "damaged" in run.stderr and "Traceback" not in run.stderr, run.stderr
        assert outside.read_text() == "mine\n" and tree_hash(tmp_path / "site") == before


def test_a_tree_patched_for_a_pin_this_checkout_has_not(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    pin = checkout.pin / "pin.toml"
    pin.write_text(pin.read_text().replace('"v1"', '"v2"'))
    for patch in checkout.pin.glob("*.patch"):
        patch.write_text(patch.read_text().replace("Pin: v1", "Pin: v2"))
    checkout.pin.rename(checkout.root / "patches/v2")
    for command in (["status"], ["check"], ["apply", "--no-build"]):
        error = refused(checkout, *command)
        assert "is patched for 'v1', which this checkout does not have (it has v2)" in error
    line = error[error.index("`python3 apply.py") + 1 :].partition("`")[0]
    assert line == f"python3 apply.py revert --sglang {checkout.package}"
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


WITHOUT = "srt/treeverify/attention/ops.py"


def test_a_pin_need_not_take_all_of_the_shared_overlay(checkout: Checkout) -> None:
    pin = checkout.pin / "pin.toml"
    taken = pin.read_text()
    pin.write_text(f'{taken}\n[overlay]\nwithout = ["{WITHOUT}"]\n')
    assert checkout.run("apply", "--no-build").returncode == 0
    assert not (checkout.package / WITHOUT).exists() and (checkout.package / "srt/treeverify/__init__.py").exists()
    (checkout.package / WITHOUT).parent.mkdir(exist_ok=True)
    (checkout.package / WITHOUT).write_text("of this pin alone\n")
    assert checkout.run("refresh").returncode == 0
    assert (checkout.pin / "overlay" / WITHOUT).read_text() == "of this pin alone\n"
    assert "def served" in (checkout.root / "overlay" / WITHOUT).read_text(), "the other pins' file is theirs"
    pin.write_text(f'{taken}\n[overlay]\nwithout = ["srt/treeverify/absent.py"]\n')
    run = checkout.run("apply", "--no-build")
    assert run.returncode == 2 and "without 'srt/treeverify/absent.py'" in run.stderr, run.stderr
