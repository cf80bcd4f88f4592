# SPDX-License-Identifier: Apache-2.0
"""apply, apply again, revert: on a small tree, on the real release, in every layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, Checkout, tree_hash


def test_revert_gives_the_same_tree(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--no-build").returncode == 0
    assert "return served(indptr)" in (checkout.package / "srt/alpha.py").read_text()
    assert "line 30 and a half" in (checkout.package / "srt/beta.py").read_text()
    assert (checkout.package / "srt/treeverify/attention/ops.py").is_file()
    assert tree_hash(checkout.package) != before
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_apply_twice_changes_nothing(checkout: Checkout) -> None:
    checkout.run("apply", "--no-build")
    before, stamps = tree_hash(checkout.package), _stamps(checkout.package)
    again = checkout.run("apply", "--no-build")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert tree_hash(checkout.package) == before
    assert _stamps(checkout.package) == stamps


def test_revert_twice_and_on_a_clean_tree(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


@pytest.mark.parametrize("loss", ["patches", "patches/v1/series"])
def test_revert_needs_no_patches(checkout: Checkout, loss: str) -> None:
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--no-build").returncode == 0
    (checkout.root / loss).rename(checkout.root / "elsewhere")
    run = checkout.run("revert")
    assert run.returncode == 0, run.stderr
    assert tree_hash(checkout.package) == before


def test_byte_code_of_the_overlay_goes_with_it(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    subprocess.run([sys.executable, "-m", "compileall", "-q", checkout.package / "srt/treeverify"], check=True)
    assert list((checkout.package / "srt/treeverify").rglob("*.pyc"))
    assert checkout.run("status").returncode == 0, "byte code is no edit"
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_modes_and_odd_bytes_survive(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_bytes(beta.read_bytes().replace(b"line 20\n", b"line 20 \xff\x0c\r\n") + b"no newline at the end")
    beta.chmod(0o755)
    checkout.write_pin()
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--no-build").returncode == 0
    assert beta.stat().st_mode & 0o777 == 0o755
    assert b"line 20 \xff\x0c\r\n" in beta.read_bytes()
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_a_newer_patch_set_replaces_the_older(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    (checkout.pin / "0002-more.patch").unlink()
    (checkout.pin / "series").write_text("0001-hook.patch\n")
    (checkout.root / "overlay/srt/treeverify/attention/ops.py").rename(checkout.root / "overlay/srt/treeverify/ops.py")
    status = checkout.run("status", "--json")
    assert status.returncode == 1 and json.loads(status.stdout)["state"] == "drifted"
    assert checkout.run("apply", "--no-build").returncode == 0
    assert "line 30 and a half" not in (checkout.package / "srt/beta.py").read_text()
    assert not (checkout.package / "srt/treeverify/attention").exists()
    assert (checkout.package / "srt/treeverify/ops.py").exists()
    assert checkout.run("status").returncode == 0
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


@pytest.mark.parametrize("given", ["", "python", "python/sglang"])
def test_real_release_as_a_repository(sglang_tree: Path, given: str) -> None:
    before = tree_hash(sglang_tree)
    assert _apply(sglang_tree / given, "apply", "--no-build").returncode == 0
    assert _git(sglang_tree, "status", "--porcelain"), "git sees the patches"
    assert _apply(sglang_tree / given, "revert").returncode == 0
    assert tree_hash(sglang_tree) == before
    assert _git(sglang_tree, "status", "--porcelain") == ""


def test_real_release_as_an_installed_package(sglang_tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (sglang_tree / "python/sglang").rename(site / "sglang")
    before = tree_hash(site)
    assert _apply(site, "apply", "--no-build").returncode == 0
    assert _apply(site, "status").returncode == 0
    assert _apply(site, "revert").returncode == 0
    assert tree_hash(site) == before


def test_editable_install_leads_to_its_checkout(checkout: Checkout, tmp_path: Path) -> None:
    repository = tmp_path / "fork"
    repository.mkdir()
    checkout.package.parent.rename(repository / "python")
    site = tmp_path / "site-packages"
    info = site / "sglang-1.0.dist-info"
    info.mkdir(parents=True)
    url = {"url": (repository / "python").as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(url))
    checkout.package = site
    assert checkout.run("apply", "--no-build").returncode == 0
    assert (repository / "python/sglang/srt/treeverify/_manifest.json").is_file()


def _apply(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "apply.py", arguments[0], "--sglang", tree, *arguments[1:]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    print(run.stdout, run.stderr)
    return run


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", tree, *arguments], capture_output=True, text=True, check=True).stdout


def _stamps(root: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}
