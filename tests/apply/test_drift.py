# SPDX-License-Identifier: Apache-2.0
"""Trees near a pin: what `check` says of every patch, in words and as JSON, and which pin it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from applier.alike import most_alike
from applier.blob import blob_id
from applier.drift import fit_lines
from applier.fit import CLEAN, CONFLICT, CRLF, MERGES, UNKNOWN, UPSTREAM, Fit, fit_patches
from applier.hunks import FilePatch, Hunk
from applier.layout import CHECKOUT, Layout
from applier.nearest import closest_pin, nearness
from applier.patchset import Patch, PatchSet, apply_patches, load_patches
from applier.pin import Pin, load_pins
from applier.sidebyside import side_by_side
from applier.tree import locate
from checkout import ALPHA, BETA, FIRST, Checkout, tree_hash
from hypothesis import given
from hypothesis import strategies as st

MLA = "srt/layers/attention/flashinfer_mla_backend.py"
DRAFT = "srt/speculative/draft_utils.py"
LINE = "self.indptr = torch.zeros((size + 1,), dtype=torch.int64)"
CONTEXT = b"        self.prefill_cuda_graph_metadata = {}  # For verify\n"


@pytest.fixture(scope="module")
def patches(pin: Pin) -> PatchSet:
    return load_patches(pin)


@pytest.fixture(scope="module")
def stock(patches: PatchSet, stock_tree: Path) -> dict[str, bytes]:
    """The touched files of the real release."""
    return {path: (stock_tree / "sglang" / path).read_bytes() for path in patches.touched}


def states(fit: Fit) -> dict[str, str]:
    return {patch.name[:4]: patch.state for patch in fit.patches}


def test_the_release_is_clean(patches: PatchSet, stock: dict[str, bytes]) -> None:
    fit = fit_patches(patches, stock.get, None)
    assert set(states(fit).values()) == {CLEAN} and fit.content == apply_patches(patches, stock.get)


def test_moved_hunks_merge(patches: PatchSet, stock: dict[str, bytes], pin: Pin) -> None:
    tree = {path: b"# a fork's line\n" + data for path, data in stock.items()}
    assert set(states(fit_patches(patches, tree.get, None)).values()) == {UNKNOWN}
    fit = fit_patches(patches, tree.get, stock.get)
    assert set(states(fit).values()) == {MERGES}
    assert fit.content == {p: b"# a fork's line\n" + d for p, d in apply_patches(patches, stock.get).items()}
    assert fit.patches[0].files[0].hunks[0].why == "moved from line 25 to 26"
    assert max(map(len, fit_lines(fit, pin))) <= 78


def test_a_changed_line_elsewhere_is_clean(patches: PatchSet, stock: dict[str, bytes]) -> None:
    tree = {**stock, MLA: stock[MLA] + b"# the end\n"}
    fit = fit_patches(patches, tree.get, None)
    assert set(states(fit).values()) == {CLEAN} and fit.content[MLA].endswith(b"# the end\n")


@pytest.mark.parametrize("more", [b"", b"# and moved\n"], ids=["exactly", "in a file that moved too"])
def test_a_patch_that_upstream_merged(patches: PatchSet, stock: dict[str, bytes], more: bytes) -> None:
    """One patch is in the tree already; the others go in as ever."""
    tree = {**stock, DRAFT: more + apply_patches(patches, stock.get)[DRAFT]}
    fit = fit_patches(patches, tree.get, None)
    assert [name for name, state in states(fit).items() if state == UPSTREAM] == ["0003"]
    assert set(states(fit).values()) == {CLEAN, UPSTREAM} and fit.content[DRAFT] == tree[DRAFT]


def test_upstream_in_other_surroundings_never_goes_in_twice(patches: PatchSet, stock: dict[str, bytes]) -> None:
    """The context of the hunk changed as well, so its lines stand nowhere as a block, and git would add them again."""
    patch = next(patch for patch in patches.patches if patch.name.startswith("0003"))
    context = patch.files[0].hunks[0].old[0].encode()
    patched = apply_patches(patches, stock.get)[DRAFT]
    assert patched.count(context) == 1
    tree = {**stock, DRAFT: patched.replace(context, b"# theirs\n" + context.replace(b"\n", b"  # too\n"))}
    assert states(fit_patches(patches, tree.get, None))["0003"] == UNKNOWN
    fit = fit_patches(patches, tree.get, stock.get)
    assert states(fit)["0003"] == UPSTREAM and fit.content[DRAFT] == tree[DRAFT]


def test_lines_that_the_tree_has_elsewhere_are_not_added_twice(checkout: Checkout) -> None:
    """It can't be taken out where the patch put it, so a person must say whether it is the same."""
    small = load_patches(load_pins(Layout(checkout.root))[0])
    text = BETA.replace("line 10\n", "line 10\nline 30 and a half\n")
    release = {"srt/alpha.py": ALPHA.encode(), "srt/beta.py": BETA.encode()}
    fit = fit_patches(small, {**release, "srt/beta.py": text.encode()}.get, release.get)
    assert [patch.state for patch in fit.patches] == [CLEAN, CONFLICT]
    (hunk,) = fit.patches[1].files[0].hunks
    assert hunk.why == "the tree has the lines it adds, in other surroundings"
    assert fit.content["srt/beta.py"].count(b"and a half") == 1


def test_upstream_below_a_changed_line_is_told_by_taking_it_out(patches: PatchSet, stock: dict[str, bytes]) -> None:
    """A hunk of an import, with another line of its context changed."""
    patched = apply_patches(patches, stock.get)[MLA]
    near = b"from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode\n"
    assert patched.count(near) == 1
    tree = {**stock, MLA: patched.replace(near, b"from sglang.srt.other import ForwardBatch, ForwardMode\n")}
    fit = fit_patches(patches, tree.get, stock.get)
    assert states(fit)["0001"] == UPSTREAM and fit.content[MLA] == tree[MLA]


def test_a_conflict_names_hunk_line_and_both_sides(patches: PatchSet, stock: dict[str, bytes]) -> None:
    other = CONTEXT.replace(b"verify", b"something else")
    tree = {**stock, MLA: b"# one\n# two\n" + stock[MLA].replace(CONTEXT, other)}
    fit = fit_patches(patches, tree.get, stock.get)
    clean = dict.fromkeys(("0002", "0003", "0004", "0005", "0006"), CLEAN)
    assert states(fit) == {"0001": CONFLICT, **clean, "0007": MERGES}
    (file,) = fit.patches[0].files
    assert [hunk.number for hunk in file.hunks if hunk.state == CONFLICT] == [2]
    hunk = file.hunks[1]
    assert tree[MLA].decode().split("\n")[hunk.line - 1] + "\n" == hunk.hunk.old[0]
    assert hunk.found is not None and other.decode() in hunk.found and CONTEXT.decode() in hunk.hunk.old
    told = hunk.as_json()
    assert [(a, b) for a, b in zip(told["expected"], told["found"], strict=True) if a != b] == [
        (CONTEXT.decode().rstrip("\n"), other.decode().rstrip("\n"))
    ]
    assert b"tree_verify.eager(forward_batch)" in fit.content[MLA], "the other hunks go in"


def test_a_merge_that_is_no_python_is_a_conflict() -> None:
    """git merges by lines: here an else is put to an if that the tree has made a with."""
    body = "".join(f"    step{i}()\n" for i in range(6))
    release = f"if ready:\n{body}end()\n".encode()
    hunk = Hunk(
        6,
        ("    step4()\n", "    step5()\n", "end()\n"),
        ("    step4()\n", "    step5()\n", "else:\n", "    wait()\n", "end()\n"),
    )
    patches = PatchSet((Patch("1", {}, (FilePatch("f.py", (hunk,)),)),), "")
    tree = f"import x\n\nwith ready:\n{body}end()\n".encode()
    fit = fit_patches(patches, {"f.py": tree}.get, {"f.py": release}.get)
    assert fit.state == CONFLICT and "no valid Python" in fit.patches[0].files[0].why and fit.content["f.py"] == tree
    still = tree.replace(b"with", b"if")
    assert fit_patches(patches, {"f.py": still}.get, {"f.py": release}.get).state == MERGES


def test_a_file_that_is_gone(patches: PatchSet, stock: dict[str, bytes]) -> None:
    tree = {path: data for path, data in stock.items() if path != DRAFT}
    fit = fit_patches(patches, tree.get, stock.get)
    assert states(fit)["0003"] == CONFLICT and "no such file" in fit.patches[2].files[0].why


def test_a_file_with_other_line_ends_is_told_so(patches: PatchSet, stock: dict[str, bytes]) -> None:
    """Not hunk by hunk; a file with one such line is none of them."""
    whole = {**stock, DRAFT: stock[DRAFT].replace(b"\n", b"\r\n")}
    fit = fit_patches(patches, whole.get, stock.get)
    (file,) = fit.patches[2].files
    assert file.state == CONFLICT and "CRLF" in file.why and fit.content[DRAFT] == whole[DRAFT]
    assert {hunk.state for hunk in file.hunks} == {CONFLICT}
    lines = fit_lines(fit, next(iter(load_pins(CHECKOUT))))
    assert [line for line in lines if "CRLF" in line or "hunk" in line] == [f"    {CRLF}"] and max(
        map(len, lines)
    ) <= 78
    one = {**stock, DRAFT: stock[DRAFT].replace(b"\n", b"\r\n", 1)}
    assert set(states(fit_patches(patches, one.get, stock.get)).values()) == {CLEAN}
    assert "CRLF" not in fit_patches(patches, {**stock, DRAFT: b""}.get, stock.get).patches[2].files[0].why


# The command.


def drifted(checkout: Checkout, change: Callable[[str], str]) -> None:
    checkout.keep_wheel()
    beta = checkout.package / "srt/beta.py"
    beta.write_text(change(BETA))


def test_check_tells_patch_by_patch_and_writes_nothing(checkout: Checkout) -> None:
    drifted(checkout, lambda text: text.replace("line 5\n", "line V\n").replace("line 29\n", "line 29\n\n"))
    before = tree_hash(checkout.root), tree_hash(checkout.package)
    run = checkout.run("check")
    assert run.returncode == 1 and not run.stdout
    head, *report = run.stderr.splitlines()
    assert "is not v1 as released: 1 of 2 files differ; nothing was changed" in head and "0001 can't be merged" in head
    assert "  nearest pin: v1, 1 of 2 touched files as released" in report
    assert any("srt/beta.py: expected" in line and "(+2 -1 lines)" in line for line in report)
    at = report.index("  0001-hook.patch: CONFLICT")
    assert report[at + 1 : at + 3] == ["    srt/beta.py", "      hunk 1 at line 4: conflict"]
    rows = [line.split() for line in report[at + 3 : at + 7]]
    assert rows == [
        ["expected", "(v1)", "found", "(line", "4)"],
        ["line", "4", "line", "4"],
        ["line", "5", "|", "line", "V"],
        ["line", "6", "line", "6"],
    ]
    assert "  0002-more.patch: applies by three-way merge (--3way)" in report
    assert "      hunk 1 at line 31: merges, moved from line 30 to 31" in report
    assert report[-1] == "  dtype contract: holds" and max(map(len, report)) <= 80
    assert (tree_hash(checkout.root), tree_hash(checkout.package)) == before


def test_check_as_json(checkout: Checkout) -> None:
    half = "line 30 and a half\n"
    drifted(checkout, lambda text: text.replace("line 5\n", "line V\n").replace("line 31\n", half + "line 31\n"))
    alpha = checkout.package / "srt/alpha.py"
    alpha.write_text(ALPHA.replace("int32", "int64"))
    told = json.loads(checkout.run("check", "--json").stdout)
    assert (told["ok"], told["exit"], told["pin"], told["files_as_released"]) == (False, 1, "v1", 0)
    assert [(patch["name"], patch["state"]) for patch in told["patches"]] == [
        ("0001-hook.patch", CONFLICT),
        ("0002-more.patch", UPSTREAM),
    ]
    assert told["contract"] == ["srt/alpha.py:6: alpha eager indptr is int64, the contract says int32: " + LINE]
    first, beta = told["patches"][0]["files"]
    assert (first["path"], first["state"], beta["state"]) == ("srt/alpha.py", CLEAN, CONFLICT)
    (hunk,) = beta["hunks"]
    assert (hunk["hunk"], hunk["line"]) == (1, 4)
    assert hunk["expected"][1:2] == ["line 5"] and hunk["found"][1] == "line V" and hunk["wanted"][1] == "line five"
    assert [item["path"] for item in told["differs"]] == ["srt/alpha.py", "srt/beta.py"]


def test_what_check_promises_apply_does(checkout: Checkout) -> None:
    """Merged and already upstream: refused without --3way, done with it, taken back byte for byte."""
    drifted(checkout, lambda text: "line 0\n" + text.replace("line 30\n", "line 30\nline 30 and a half\n"))
    before = tree_hash(checkout.package)
    refused = checkout.run("apply", "--no-build")
    assert refused.returncode == 1 and "they apply with --3way" in refused.stderr
    assert "0002-more.patch: already upstream" in refused.stderr
    check = checkout.run("check", "--3way", "--json")
    assert check.returncode == 0 and [p["state"] for p in json.loads(check.stdout)["patches"]] == [MERGES, UPSTREAM]
    assert tree_hash(checkout.package) == before
    assert checkout.run("apply", "--no-build", "--3way").returncode == 0
    text = (checkout.package / "srt/beta.py").read_text()
    assert text.startswith("line 0\n") and "line five\n" in text and text.count("half") == 1
    assert checkout.run("status").returncode == 0
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_a_patch_merged_upstream_exactly_is_not_taken_for_ours(checkout: Checkout) -> None:
    """The file is the release's with the whole patch in, byte for byte, and the rest of the tree has none of it."""
    checkout.write_patch(
        "0001-hook.patch", "The hook", "srt/alpha.py", FIRST.partition("--- a/python/sglang/srt/beta")[0]
    )
    drifted(checkout, lambda text: text.replace("line 30\n", "line 30\nline 30 and a half\n"))
    before = tree_hash(checkout.package)
    refused = checkout.run("check")
    assert refused.returncode == 1 and "folder srt/treeverify is gone" not in refused.stderr
    assert "0002-more.patch: already upstream" in refused.stderr and "they apply with --3way" in refused.stderr
    status = json.loads(checkout.run("status", "--json").stdout)
    assert status["state"] == "drifted" and "as upstream may: 0002-more.patch" in str(status["reasons"])
    assert not any("reinstall" in way["command"] for way in status["advice"])
    assert checkout.run("apply", "--no-build", "--3way").returncode == 0
    assert checkout.run("revert").returncode == 0 and tree_hash(checkout.package) == before


def test_a_file_that_speaks_of_our_package_is_ours(checkout: Checkout) -> None:
    """Without our folder and not as any patch makes it, so neither the release's nor upstream's."""
    (checkout.package / "srt/alpha.py").write_text(f"from sglang.srt import treeverify\n{ALPHA}")
    status = json.loads(checkout.run("status", "--json").stdout)
    assert status["state"] == "partial" and "patched, but without" in str(status["reasons"])


def test_what_differs_fits_a_terminal(checkout: Checkout) -> None:
    """A file that differs and was edited since the commit of its repository, told with all that is known of it."""
    git = ["git", "-C", str(checkout.package.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "the release"]):
        subprocess.run([*git, *arguments], check=True)
    drifted(checkout, lambda text: text + "line 41\n")
    report = checkout.run("check").stderr.splitlines()
    at = report.index("  srt/beta.py:")
    assert report[at + 2] == "    (+1 -0 lines, edited since the commit)" and max(map(len, report[1:])) <= 80


def test_the_release_is_not_fetched_where_it_is_not_needed(checkout: Checkout) -> None:
    """Exact hunks need no merge; there is no sglang 1.0 to fetch."""
    beta = checkout.package / "srt/beta.py"
    beta.write_text(BETA + "line 41\n")
    run = checkout.run("check")
    assert run.returncode == 1 and "every hunk is exact, so --force applies them" in run.stderr
    assert "downloading" not in run.stderr and run.stderr.count("applies cleanly") == 2


def test_without_the_release_no_merge_is_promised(checkout: Checkout) -> None:
    beta = checkout.package / "srt/beta.py"
    beta.write_text("line 0\n" + BETA)
    run = checkout.run("apply", "--no-build")
    assert run.returncode == 1 and "0001-hook.patch: not exact" in run.stderr
    assert "v1 is not at hand; `apply.py check` fetches it" in run.stderr and "downloading" not in run.stderr


def test_the_nearest_pin_is_taken_and_named(checkout: Checkout) -> None:
    """A second release, in which one more file is other; the tree is near to that one."""
    second = checkout.root / "patches/v2"
    shutil.copytree(checkout.pin, second)
    for path in (*second.glob("*.patch"), second / "pin.toml"):
        text = path.read_text().replace("Pin: v1", "Pin: v2").replace('"v1"', '"v2"')
        path.write_text(text.replace('"1.0"', '"2.0"'))
    (second / "pin.toml").write_text((second / "pin.toml").read_text().replace("default = true\n", ""))
    (checkout.package / "srt/alpha.py").write_text(ALPHA + "# two\n")
    text = (second / "pin.toml").read_text()
    text = text.replace(blob_id(ALPHA.encode()), blob_id((ALPHA + "# two\n").encode()))
    (second / "pin.toml").write_text(text)
    tree, pins = locate(checkout.package), load_pins(Layout(checkout.root))
    assert [pin.name for pin in pins] == ["v1", "v2"] and closest_pin(tree, pins).name == "v2"
    (checkout.package / "srt/beta.py").write_text(BETA + "line 41\n")
    assert closest_pin(tree, pins).name == "v2" and "v2, 1 of 2" in str(nearness(tree, pins[1]))
    (checkout.package / "srt/alpha.py").write_text(ALPHA + "# three\n")
    assert closest_pin(tree, pins).name == "v1", "the default among equals"
    first = checkout.pin / "0002-more.patch"
    first.write_text(first.read_text().replace(" line 31\n", " line 31.\n"))
    assert closest_pin(tree, pins).name == "v2", "the one whose hunks stand in the tree, among equals"
    (checkout.package / "_version.py").write_text("__version__ = version = '1.0'\n")
    assert closest_pin(tree, pins).name == "v1", "the tree's own version among equals"
    run = checkout.run("check", "--pin", "v2")
    assert "nearest pin: v1, 0 of 2" in run.stderr and "held against v2" in run.stderr
    assert "the tree says it is SGLang 1.0" in run.stderr


# The parts.


@given(st.lists(st.text("ab \t", max_size=30), max_size=6), st.lists(st.text("ab c", max_size=30), max_size=6))
def test_side_by_side_shows_every_character_within_its_width(left: list[str], right: list[str]) -> None:
    rows = side_by_side(left, right, ("one", "two"), 41)
    assert max(map(len, rows)) <= 41
    columns = ["".join(row[:19].strip() for row in rows[1:]), "".join(row[22:].strip() for row in rows[1:])]
    for side, shown in zip((left, right), columns, strict=True):
        assert sorted("".join(side).replace(" ", "").replace("\t", "")) == sorted(shown.replace(" ", ""))
    marks = {row[20:21].strip() for row in rows[1:]}
    assert (marks <= {""}) == ([line.expandtabs(4) for line in left] == [line.expandtabs(4) for line in right])


def test_side_by_side_takes_a_terminal_s_columns_and_gives_it_no_orders() -> None:
    """Wide characters count twice, accents of their own not at all; escapes, bells, bytes of no text are spelt."""
    left, right = ["中文" * 5 + "\n", "\x1b[31m\a\r\n"], ["e\u0301" * 3 + "\n", "\udcff\n"]
    head, row, more, odd = side_by_side(left, right, ("a", "b"), 35)
    assert head == "a                  b" and row == "中文中文中文中文 | e\u0301e\u0301e\u0301" and more == "中文"
    assert odd == "\\x1b[31m\\x07\\r   | \\udcff"


def test_a_file_that_is_no_text_is_a_conflict_told_by_its_name(checkout: Checkout) -> None:
    """git merges no such files."""
    checkout.keep_wheel()
    (checkout.package / "srt/beta.py").write_bytes(b"\0\n" + BETA.encode())
    for arguments in (["check"], ["apply", "--no-build", "--3way"]):
        run = checkout.run(*arguments)
        assert run.returncode == 1 and "0001-hook.patch: CONFLICT" in run.stderr
        assert "srt/beta.py: it is no text" in " ".join(run.stderr.split())


def test_the_place_most_alike_is_found_despite_changes() -> None:
    lines = [f"value_{i} = compute({i})\n" for i in range(200)]
    block = lines[120:127]
    changed = [*lines[:100], *lines[110:122], "inserted = True\n", *lines[122:123], "value_x = 1\n", *lines[124:]]
    at, found = most_alike(block, changed) or (0, ())
    assert found == (*lines[120:122], "inserted = True\n", lines[122], "value_x = 1\n", *lines[124:127])
    assert list(found) == changed[at - 1 : at - 1 + len(found)]
    assert most_alike(["    something_else()\n"], lines) is None and most_alike([], lines) is None
