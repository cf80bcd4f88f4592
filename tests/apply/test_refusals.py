# SPDX-License-Identifier: Apache-2.0
"""What apply refuses: unknown trees, drift, edits, paths that lead out. Nothing is ever changed by a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ALPHA, FIRST, HEADER, ROOT, Checkout, tree_hash


def refused(checkout: Checkout, *arguments: str, code: int = 1) -> str:
    """Runs a command that must fail with `code` and leave every byte as it was; gives its stderr."""
    before = tree_hash(checkout.package)
    run = checkout.run(*arguments)
    assert run.returncode == code, run.stdout + run.stderr
    assert tree_hash(checkout.package) == before
    assert not list(checkout.package.rglob("*.rej")) and "<<<<<<<" not in (checkout.package / "srt/beta.py").read_text()
    return run.stderr


def test_unknown_tree_lists_the_files_that_differ(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text(beta.read_text() + "line 41\n")
    error = refused(checkout, "apply", "--no-build")
    assert "1 of 2 files differ" in error and "srt/beta.py: expected" in error and "srt/alpha.py: expected" not in error
    assert refused(checkout, "check")
    (checkout.package / "srt/alpha.py").unlink()
    assert "srt/alpha.py: expected" in refused(checkout, "apply", "--no-build")


def test_force_takes_an_unknown_tree_where_every_hunk_is_exact(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text(beta.read_text() + "line 41\n")
    before = tree_hash(checkout.package)
    assert checkout.run("check", "--force").returncode == 0
    assert checkout.run("apply", "--no-build", "--force").returncode == 0
    assert checkout.run("status").returncode == 0
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_three_way_merges_what_moved(sglang_tree: Path) -> None:
    """The real release with a line added above every hunk, and one file from which nothing moved."""
    for name in ("layers/attention/flashinfer_mla_backend.py", "model_executor/model_runner.py"):
        path = sglang_tree / "python/sglang/srt" / name
        path.write_text("# a fork's line\n" + path.read_text())
    before = tree_hash(sglang_tree)
    run = [sys.executable, ROOT / "apply.py"]
    at = ["--sglang", sglang_tree]
    refused = subprocess.run([*run, "apply", "--no-build", *at], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "2 of" in refused.stderr and tree_hash(sglang_tree) == before
    forced = subprocess.run([*run, "apply", "--no-build", "--force", *at], capture_output=True, text=True, check=False)
    assert forced.returncode == 1 and "merges, moved from line" in forced.stderr
    assert tree_hash(sglang_tree) == before
    merged = subprocess.run([*run, "apply", "--no-build", "--3way", *at], capture_output=True, text=True, check=False)
    assert merged.returncode == 0, merged.stderr
    backend = (sglang_tree / "python/sglang/srt/layers/attention/flashinfer_mla_backend.py").read_text()
    assert backend.startswith("# a fork's line\n") and "treeverify.attach(" in backend
    assert subprocess.run([*run, "status", *at], capture_output=True, check=False).returncode == 0
    assert subprocess.run([*run, "revert", *at], capture_output=True, check=False).returncode == 0
    assert tree_hash(sglang_tree) == before


def test_three_way_conflict_names_the_hunk(sglang_tree: Path) -> None:
    path = sglang_tree / "python/sglang/srt/layers/attention/flashinfer_mla_backend.py"
    text = path.read_text()
    line = "        self.prefill_cuda_graph_metadata = {}  # For verify\n"
    assert line in text
    path.write_text(text.replace(line, line.replace("# For verify", "# For something else")))
    before = tree_hash(sglang_tree)
    command = [sys.executable, ROOT / "apply.py", "apply", "--no-build", "--3way", "--sglang", sglang_tree]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "0001-" in run.stderr and "For something else" in run.stderr
    assert tree_hash(sglang_tree) == before


def test_drift_report_says_patch_file_hunk_and_lines(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text(beta.read_text().replace("line 31\n", "line thirty-one\n"))
    error = refused(checkout, "apply", "--no-build", "--force")
    told = [line.split() for line in error.splitlines()]
    at = told.index(["hunk", "1", "at", "line", "30:", "not", "exact,", "its", "lines", "differ"])
    assert told[at + 3] == ["line", "31", "|", "line", "thirty-one"], "side by side, though there is no release at hand"
    assert error.startswith("error: --force takes exact hunks alone, and some are not; nothing was changed.")
    without = refused(checkout, "apply", "--no-build")
    assert error.splitlines()[1:] == without.splitlines()[1:], "one report, with --force and without"


def test_shifted_context_is_drift_and_told(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text("line 0\n" + beta.read_text())
    error = refused(checkout, "apply", "--no-build", "--force")
    assert "srt/beta.py\n      hunk 1 at line 5: not exact, moved from line 4 to 5" in error


def test_upstreamed_hunk_is_told(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text(beta.read_text().replace("line 30\n", "line 30\nline 30 and a half\n"))
    error = refused(checkout, "apply", "--no-build", "--force")
    assert "0002-more.patch: already upstream" in error and "they apply with --3way" in error
    status = checkout.run("status", "--json")
    states = {patch["name"]: patch["state"] for patch in json.loads(status.stdout)["patches"]}
    assert status.returncode == 1 and states["0002-more.patch"] == "applied"


def test_all_or_nothing_when_the_last_patch_fails(checkout: Checkout) -> None:
    checkout.write_patch(
        "0003-bad.patch", "Can't go in", "srt/alpha.py", FIRST.split("--- a/python/sglang/srt/beta")[0]
    )
    error = refused(checkout, "apply", "--no-build")
    assert "0003-bad.patch: srt/alpha.py: hunk 1" in error


@pytest.mark.parametrize("command", [["apply", "--no-build"], ["revert"]])
@pytest.mark.parametrize("path", ["srt/alpha.py", "srt/treeverify/attention/ops.py"])
def test_edited_files_are_refused_and_kept(checkout: Checkout, command: list[str], path: str) -> None:
    checkout.run("apply", "--no-build")
    edited = checkout.package / path
    edited.write_text(edited.read_text() + "# mine\n")
    assert path in refused(checkout, *command)
    status = checkout.run("status", "--json")
    assert status.returncode == 1 and json.loads(status.stdout)["state"] == "edited"


def test_own_files_in_our_folder_are_refused_and_kept(checkout: Checkout) -> None:
    checkout.run("apply", "--no-build")
    (checkout.package / "srt/treeverify/notes.txt").write_text("mine")
    assert "notes.txt" in refused(checkout, "revert")


def test_forced_revert_saves_edits_first(checkout: Checkout) -> None:
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    alpha = checkout.package / "srt/alpha.py"
    alpha.write_text(alpha.read_text() + "# mine\n")
    (checkout.package / "srt/treeverify/notes.txt").write_text("mine")
    assert checkout.run("revert", "--force").returncode == 0
    assert tree_hash(checkout.package) == clean
    assert "# mine" in (checkout.root / "build/edits-1/srt/alpha.py").read_text()
    assert (checkout.root / "build/edits-1/srt/treeverify/notes.txt").read_text() == "mine"


def test_checkout_of_touched_files_is_partial_and_applies_again(checkout: Checkout) -> None:
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    applied = tree_hash(checkout.package)
    (checkout.package / "srt/alpha.py").write_text(ALPHA)  # as `git checkout -- .` does
    status = checkout.run("status", "--json")
    assert status.returncode == 1 and json.loads(status.stdout)["state"] == "partial"
    assert checkout.run("apply", "--no-build").returncode == 0
    assert tree_hash(checkout.package) == applied
    (checkout.package / "srt/alpha.py").write_text(ALPHA)
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == clean


def test_foreign_overlay_is_refused(checkout: Checkout) -> None:
    (checkout.package / "srt/treeverify").mkdir()
    (checkout.package / "srt/treeverify/theirs.py").write_text("")
    assert "theirs.py" in refused(checkout, "apply", "--no-build")
    assert json.loads(checkout.run("status", "--json").stdout)["state"] == "partial"


@pytest.mark.parametrize("path", ["../escape.py", "/etc/escape.py", "srt/../../escape.py"])
def test_patch_paths_stay_inside(checkout: Checkout, path: str) -> None:
    hunk = f"--- a/{path}\n+++ b/{path}\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    checkout.write_patch("0009-out.patch", "Leads out", path, hunk)
    assert "not a path below the sglang package" in refused(checkout, "apply", "--no-build", code=2)


@pytest.mark.parametrize("link", ["srt/beta.py", "srt"])
def test_links_that_lead_out_are_not_followed(checkout: Checkout, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    (checkout.package / link).rename(outside)
    (checkout.package / link).symlink_to(outside)
    content = tree_hash(tmp_path)
    run = checkout.run("apply", "--no-build")
    assert run.returncode == 1 and "outside the package" in run.stderr
    assert tree_hash(tmp_path) == content


@pytest.mark.parametrize("place", ["srt/beta.py", "srt/treeverify/pipe.py"])
def test_a_pipe_is_not_waited_for(checkout: Checkout, place: str) -> None:
    checkout.run("apply", "--no-build")
    (checkout.package / place).unlink(missing_ok=True)
    os.mkfifo(checkout.package / place)
    for command in (["status"], ["apply", "--no-build"], ["revert", "--force"], ["refresh"]):
        run = subprocess.run(checkout.command(*command), capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 1 and f"{place} is no file but a pipe" in run.stderr, run.stderr


def test_patch_of_a_file_without_a_blob(checkout: Checkout) -> None:
    (checkout.package / "srt/gamma.py").write_text("a\n")
    checkout.write_patch(
        "0009-gamma.patch", "No blob", "srt/gamma.py", "--- a/srt/gamma.py\n+++ b/srt/gamma.py\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert "srt/gamma.py, which has no blob" in refused(checkout, "apply", "--no-build", code=2)


@pytest.mark.parametrize("field", ["Description", "Upstream", "Remove-When", "Test"])
def test_headers_are_required(checkout: Checkout, field: str) -> None:
    patch = checkout.pin / "0001-hook.patch"
    lines = [
        line for line in patch.read_text().splitlines(keepends=True) if not line.startswith((f"{field}:", " What"))
    ]
    patch.write_text("".join(lines))
    assert field in refused(checkout, "apply", "--no-build", code=2)


def test_touches_must_tell_the_truth(checkout: Checkout) -> None:
    checkout.write_patch("0001-hook.patch", "Says less than it does", "srt/alpha.py", FIRST)
    assert "Touches" in refused(checkout, "apply", "--no-build", code=2)


def test_new_files_belong_into_the_overlay(checkout: Checkout) -> None:
    hunk = "--- /dev/null\n+++ b/srt/new.py\n@@ -0,0 +1 @@\n+a\n"
    (checkout.pin / "0009-new.patch").write_text(HEADER.format(title="New", touches="srt/new.py") + hunk)
    (checkout.pin / "series").write_text("0001-hook.patch\n0002-more.patch\n0009-new.patch\n")
    assert "overlay" in refused(checkout, "apply", "--no-build", code=2)


def test_series_and_folder_agree(checkout: Checkout) -> None:
    (checkout.pin / "series").write_text("0001-hook.patch\n")
    assert "0002-more.patch" in refused(checkout, "list", code=2)


def test_broken_contract_is_exit_3_with_the_line(checkout: Checkout) -> None:
    alpha = checkout.package / "srt/alpha.py"
    alpha.write_text(ALPHA.replace("int32", "int64"))
    checkout.write_pin()
    error = refused(checkout, "apply", "--no-build", code=3)
    assert "srt/alpha.py:6: alpha eager indptr is int64, the contract says int32" in error
    report = checkout.run("check", "--json")
    assert report.returncode == 3 and json.loads(report.stdout)["exit"] == 3


def test_wrong_usage_is_exit_2(checkout: Checkout, tmp_path: Path) -> None:
    assert "no pin 'v9'" in refused(checkout, "apply", "--no-build", "--pin", "v9", code=2)
    refused(checkout, "fly", code=2)
    run = subprocess.run(
        [sys.executable, ROOT / "apply.py", "status", "--sglang", tmp_path], capture_output=True, text=True
    )
    assert run.returncode == 2 and "no sglang package there" in run.stderr


def test_commit_that_is_not_the_pins_is_a_note_only(sglang_tree: Path) -> None:
    git = ["git", "-C", str(sglang_tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    (sglang_tree / "README").write_text("a fork\n")
    subprocess.run([*git, "add", "README"], check=True)
    subprocess.run([*git, "commit", "-qm", "fork"], check=True)
    run = subprocess.run(
        [sys.executable, ROOT / "apply.py", "check", "--sglang", sglang_tree],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and "note: HEAD is" in run.stderr


def test_edit_of_a_committed_file_is_called_that(sglang_tree: Path) -> None:
    touched = sglang_tree / "python/sglang/srt/speculative/draft_utils.py"
    touched.write_text(touched.read_text() + "\n")
    run = subprocess.run(
        [sys.executable, ROOT / "apply.py", "check", "--sglang", sglang_tree],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and "draft_utils.py" in run.stderr and "edited since the commit" in run.stderr


def test_read_only_tree(checkout: Checkout) -> None:
    """Root without the capability to override modes is refused like anybody else."""
    before = tree_hash(checkout.package)
    plain = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    os.chmod(checkout.package / "srt", 0o555)
    for command in (["apply", "--no-build"], ["check"]):
        run = subprocess.run(
            [*plain, *checkout.command(*command)], capture_output=True, text=True, env=checkout.env(), check=False
        )
        assert run.returncode == 2 and "owner" in run.stderr, run.stderr
    os.chmod(checkout.package / "srt", 0o755)
    assert tree_hash(checkout.package) == before


def told(checkout: Checkout, *arguments: str) -> str:
    """The stderr of a refusal that is no traceback and changes nothing."""
    before = tree_hash(checkout.package)
    run = checkout.run(*arguments)
    assert run.returncode in (1, 2) and "Traceback" not in run.stderr, run.stderr
    assert tree_hash(checkout.package) == before
    return run.stderr


COMMANDS = [["status"], ["check"], ["apply", "--no-build"], ["revert"], ["revert", "--force"], ["doctor"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_broken_journal_is_told_with_the_way_out(checkout: Checkout, command: list[str]) -> None:
    checkout.run("apply", "--no-build")
    journal = checkout.package / "srt/treeverify/_journal"
    journal.mkdir()
    (journal / "plan.json").touch()
    error = told(checkout, *command)
    assert f"{journal}, is damaged" in error and f"delete {journal.parent}" in error


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("broken", ["base", "files", "list", "overlay", "bytes"])
def test_a_damaged_manifest_is_told_with_the_way_out(checkout: Checkout, command: list[str], broken: str) -> None:
    checkout.run("apply", "--no-build")
    path = checkout.package / "srt/treeverify/_manifest.json"
    manifest = json.loads(path.read_text())
    if broken == "base":
        del manifest["files"]["srt/alpha.py"]["base"]
    elif broken == "overlay":
        manifest["overlay"] = {"srt/treeverify/__init__.py": None}
    elif broken == "files":
        manifest["files"] = ["srt/alpha.py"]
    path.write_bytes(b"\xff" if broken == "bytes" else json.dumps([1] if broken == "list" else manifest).encode())
    error = told(checkout, *command)
    assert f"{path} is damaged" in error and "give the release back" in error


@pytest.mark.parametrize(
    "record", ["", "{", "[1]", '{"url": 1, "dir_info": {"editable": true}}', '{"dir_info": 1}', "\xff"]
)
def test_a_broken_direct_url_tells_nothing(checkout: Checkout, tmp_path: Path, record: str) -> None:
    site = tmp_path / "packages"
    info = site / "sglang-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_bytes(record.encode("latin-1"))
    checkout.package = site
    assert "no sglang package there" in told(checkout, "status")


def test_editable_installs_that_lead_to_each_other_end(checkout: Checkout, tmp_path: Path) -> None:
    sites = [tmp_path / "one", tmp_path / "two"]
    for site, other in zip(sites, reversed(sites), strict=True):
        info = site / "sglang-1.0.dist-info"
        info.mkdir(parents=True)
        url = {"url": other.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))
    checkout.package = sites[0]
    assert "no sglang package there" in told(checkout, "status")


def test_folders_that_cannot_be_are_named(checkout: Checkout, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for folder in (Path("~nosuch"), loop, tmp_path / "nothing"):
        checkout.package = folder
        run = checkout.run("status")
        assert run.returncode == 2 and f"--sglang {folder}: " in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("command", [["status"], ["check"], ["doctor"], ["revert"]], ids=" ".join)
@pytest.mark.parametrize("theirs", ["srt/treeverify", "srt/treeverify/__pycache__/x.pyc", "srt/treeverify/_journal/x"])
def test_a_folder_that_is_not_ours_is_left(checkout: Checkout, command: list[str], theirs: str) -> None:
    path = checkout.package / theirs
    if theirs == "srt/treeverify":
        path.mkdir()
    else:
        path.parent.mkdir(parents=True)
        path.write_text("theirs")
    before = tree_hash(checkout.package)
    run = checkout.run(*command)
    assert "Traceback" not in run.stderr
    assert tree_hash(checkout.package) == before
    if theirs.endswith("_journal/x"):
        assert theirs in refused(checkout, "apply", "--no-build")
