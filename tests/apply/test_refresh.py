# SPDX-License-Identifier: Apache-2.0
"""Edits of a patched tree, brought back into patches and overlay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from applier.attribution import Edit, owner, stages, with_edits
from applier.blob import blob_id
from applier.checkoutfiles import replace_all, settle
from applier.errors import ApplierError, DriftError, UsageError
from applier.hunks import FilePatch, Hunk
from applier.layout import CHECKOUT, HOME, Layout
from applier.linediff import unified
from applier.manifest import load_manifest
from applier.patchset import apply_patches, load_patches
from applier.patchtext import parse
from applier.pin import Pin, load_pin
from applier.pintext import settled, waiting, with_blobs, without
from applier.plan import originals
from applier.refresh import Refresh, Wish, plan_refresh, refresh_tree
from applier.release import load_release
from applier.state import inspect
from applier.tree import Tree, locate
from checkout import ALPHA, BETA, Checkout, make_checkout, tree_hash
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small checkout and its package, patched."""
    folder = tmp_path_factory.mktemp("template")
    assert make_checkout(folder).run("apply", "--no-build").returncode == 0
    return folder


@pytest.fixture
def applied(template: Path, tmp_path: Path) -> Checkout:
    """A copy of the patched one."""
    shutil.copytree(template, tmp_path / "copy")
    return Checkout(tmp_path / "copy/treeverify", tmp_path / "copy/site/sglang")


def edit(checkout: Checkout, path: str, old: str, new: str) -> None:
    file = checkout.package / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def refreshed(checkout: Checkout, *, state: str = "applied", **wish: Any) -> Refresh:
    """Refreshes; the tree must then be what the patches as written make of the release, and what apply would make."""
    layout, tree = Layout(checkout.root), locate(checkout.package)
    pin, plan = refresh_tree(layout, tree, Wish(**wish))
    release = load_release(layout, load_pin(pin.folder))
    assert inspect(tree, release, "").state == state
    if state == "applied":
        manifest = load_manifest(tree)
        assert manifest is not None
        base = originals(tree, manifest)
        made = apply_patches(release.patches, base.get)
        assert set(made) == set(manifest.files) == set(base)
        assert all(tree.read(path) == data for path, data in made.items())
    return plan


def taken(plan: Refresh) -> list[tuple[str, int, str]]:
    return [(item.path, item.line, item.into) for item in plan.taken]


def refusal(checkout: Checkout, **wish: Any) -> str:
    """What refresh says where it refuses; nothing was written."""
    before = tree_hash(checkout.root), tree_hash(checkout.package)
    with pytest.raises(ApplierError) as error:
        refresh_tree(Layout(checkout.root), locate(checkout.package), Wish(**wish))
    assert (tree_hash(checkout.root), tree_hash(checkout.package)) == before
    return "\n".join([error.value.message, *error.value.details])


def sources(checkout: Checkout) -> dict[str, bytes]:
    folders = (checkout.root / "patches", checkout.root / "overlay")
    return {str(p.relative_to(checkout.root)): p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


def test_an_untouched_tree_changes_nothing(applied: Checkout) -> None:
    before = tree_hash(applied.root), tree_hash(applied.package)
    plan = refreshed(applied)
    assert not plan.writes and not plan.taken
    assert (tree_hash(applied.root), tree_hash(applied.package)) == before


def test_edits_go_to_the_patch_whose_lines_they_change(applied: Checkout) -> None:
    """From the command line to the tree that revert gives."""
    before = sources(applied)
    edit(applied, "srt/alpha.py", "if hooked():", "if hooked(bs):")
    edit(applied, "srt/beta.py", "line 30 and a half\n", "line 30 and a half\nline 30 and three quarters\n")
    edit(applied, "srt/treeverify/attention/ops.py", "return x", "return x + 1")
    (applied.package / "srt/treeverify/new.py").write_text("NEW = 1\n")
    editors = applied.package / "srt/treeverify/.new.py.swp"
    editors.write_text("an editor's")
    trees = tree_hash(applied.root), tree_hash(applied.package)
    run = applied.run("refresh", "--dry-run")
    assert run.returncode == 0 and "would be written: patches/v1/0001-hook.patch" in run.stdout
    assert "srt/alpha.py:10 -> 0001-hook.patch (changes its lines)" in run.stdout
    assert (tree_hash(applied.root), tree_hash(applied.package)) == trees

    told = json.loads(applied.run("refresh", "--json").stdout)
    assert told["ignored"] == ["srt/treeverify/.new.py.swp"]
    editors.unlink()
    assert (
        changed(before, sources(applied))
        == set(told["written"])
        == {
            "patches/v1/0001-hook.patch",
            "patches/v1/0002-more.patch",
            "overlay/srt/treeverify/attention/ops.py",
            "overlay/srt/treeverify/new.py",
        }
    )
    assert [(item["path"], item["line"], item["into"]) for item in told["edits"]] == [
        ("srt/alpha.py", 10, "0001-hook.patch"),
        ("srt/beta.py", 32, "0002-more.patch"),
        ("srt/treeverify/attention/ops.py", 1, "overlay/srt/treeverify/attention/ops.py"),
        ("srt/treeverify/new.py", 1, "overlay/srt/treeverify/new.py"),
    ]
    first = (applied.pin / "0001-hook.patch").read_text()
    old = before["patches/v1/0001-hook.patch"].decode()
    assert first.split("diff --git")[0] == old.split("--- a/")[0], "the header is kept"
    assert "+        if hooked(bs):\n" in first and "index " not in first
    assert first.endswith(old[old.index("--- a/python/sglang/srt/beta.py") :]), "so is the other file's section"
    assert "+line 30 and three quarters\n" in (applied.pin / "0002-more.patch").read_text()
    assert applied.run("status").returncode == 0
    once = sources(applied)
    assert not refreshed(applied).writes and sources(applied) == once
    assert applied.run("revert").returncode == 0
    assert (applied.package / "srt/alpha.py").read_text() == ALPHA
    assert (applied.package / "srt/beta.py").read_text() == BETA


def test_an_edit_elsewhere_goes_to_the_nearest_hunk(applied: Checkout) -> None:
    edit(applied, "srt/beta.py", "line 9\n", "line nine\n")
    edit(applied, "srt/beta.py", "line 27\n", "")
    assert [(item.into, item.why) for item in refreshed(applied).taken] == [
        ("0001-hook.patch", "3 lines from its nearest hunk"),
        ("0002-more.patch", "3 lines from its nearest hunk"),
    ]


def test_patch_overrides(applied: Checkout) -> None:
    """A line near the first patch's goes to the second; the first patch, which comes before, stays as it is."""
    first = (applied.pin / "0001-hook.patch").read_bytes()
    edit(applied, "srt/beta.py", "line 9\n", "line nine\n")
    refreshed(applied, patch="0002-more.patch")
    assert (applied.pin / "0001-hook.patch").read_bytes() == first
    assert "-line 9\n+line nine\n" in (applied.pin / "0002-more.patch").read_text()
    assert "has no patch 3; it has 0001-hook.patch, 0002-more.patch" in refusal(applied, patch="3")


def test_an_earlier_patch_takes_an_edit_and_the_later_one_follows(applied: Checkout) -> None:
    """Line numbers and context of the later patch count in the file as the earlier one leaves it."""
    edit(applied, "srt/beta.py", "line 29\n", "line 29\nline 29 and a half\n")
    refreshed(applied, patch="0001-hook.patch")
    second = (applied.pin / "0002-more.patch").read_text()
    assert "@@ -29,6 +29,7 @@" in second and " line 29 and a half\n" in second and "+line 29" not in second


def test_a_file_that_the_patch_did_not_touch_comes_into_its_header(applied: Checkout) -> None:
    edit(applied, "srt/alpha.py", "import torch\n", "import torch  # ours\n")
    refreshed(applied, patch="0002-more.patch")
    second = (applied.pin / "0002-more.patch").read_text()
    assert "\nTouches: srt/alpha.py, srt/beta.py\n" in second


def test_a_file_that_no_patch_touches(applied: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs to be named, its content as released comes from the wheel, and its blob goes into the pin."""
    gamma = applied.package / "srt/gamma.py"
    gamma.write_text("g = 1\n")
    applied.keep_wheel()
    monkeypatch.setenv("TREEVERIFY_CACHE", str(applied.cache))
    gamma.write_text("g = 2\n")
    assert not refreshed(applied).writes, "other files are the user's"
    assert "no patch touches srt/gamma.py" in refusal(applied, add=("srt/gamma.py",))
    for path in ("srt/delta.py", "", "../outside.py", "/srt/gamma.py", "srt"):
        assert f"--add {path!r}: v1 has no such file" in refusal(applied, add=(path,))
    plan = refreshed(applied, add=("srt/gamma.py",), patch="0002-more.patch")
    assert set(plan.writes) == {"patches/v1/0002-more.patch", "patches/v1/pin.toml"}
    assert '"srt/gamma.py" = "' in (applied.pin / "pin.toml").read_text()
    assert applied.run("revert").returncode == 0 and gamma.read_text() == "g = 1\n"
    assert applied.run("apply", "--no-build").returncode == 0 and gamma.read_text() == "g = 2\n"


def test_an_edit_of_a_later_patch_s_lines_is_not_forced_into_an_earlier_one(applied: Checkout) -> None:
    edit(applied, "srt/beta.py", "line 30 and a half\n", "line 30 and a quarter\n")
    assert "changes lines that 0002-more.patch makes" in refusal(applied, patch="0001-hook.patch")


def test_a_patch_that_became_empty_is_reported_and_dropped_on_demand(applied: Checkout) -> None:
    before = sources(applied)
    edit(applied, "srt/beta.py", "line 30 and a half\n", "")
    told = refusal(applied)
    assert "0002-more.patch: srt/beta.py" in told and "--drop-empty" in told
    plan = refreshed(applied, drop_empty=True)
    assert plan.empty == ["0002-more.patch"] and not (applied.pin / "0002-more.patch").exists()
    assert (applied.pin / "series").read_text() == "0001-hook.patch\n"
    assert changed(before, sources(applied)) == {"patches/v1/0002-more.patch", "patches/v1/series"}


def test_a_file_out_of_a_patch_takes_its_blob_along(applied: Checkout) -> None:
    (applied.package / "srt/alpha.py").write_text(ALPHA)
    assert refreshed(applied, drop_empty=True).empty == [], "the patch has another file"
    assert "Touches: srt/beta.py\n" in (applied.pin / "0001-hook.patch").read_text()
    assert '"srt/alpha.py" =' not in (applied.pin / "pin.toml").read_text()
    assert "[[dtype]]" in (applied.pin / "pin.toml").read_text()
    assert not (applied.package / f"srt/treeverify/_originals/{blob_id(ALPHA.encode())}").exists()


def test_headers_that_changed_meanwhile_are_no_obstacle(applied: Checkout) -> None:
    first = applied.pin / "0001-hook.patch"
    first.write_text(first.read_text().replace("The backend calls", "The backend now calls"))
    edit(applied, "srt/beta.py", "line five\n", "line V\n")
    refreshed(applied)
    assert "now calls" in first.read_text() and "+line V\n" in first.read_text()


def test_hunks_that_changed_meanwhile_are(applied: Checkout) -> None:
    """Nobody can tell whether the tree's lines or the patch's are the newer ones."""
    first = applied.pin / "0001-hook.patch"
    first.write_text(first.read_text().replace("line five", "line FIVE"))
    edit(applied, "srt/beta.py", "line five\n", "line V\n")
    assert "the patches changed since they were applied" in refusal(applied)


def test_bytes_that_are_no_text_are_refused(applied: Checkout) -> None:
    beta = applied.package / "srt/beta.py"
    beta.write_bytes(beta.read_bytes().replace(b"line five", b"line \xff"))
    assert "bytes that are no UTF-8" in refusal(applied)


def test_other_line_ends_are_no_edit(applied: Checkout) -> None:
    """Of the whole file, that is; a patch of all its lines is what nobody wants."""
    beta = applied.package / "srt/beta.py"
    text = beta.read_bytes()
    beta.write_bytes(text.replace(b"\n", b"\r\n"))
    assert "srt/beta.py has CRLF line ends now" in refusal(applied)
    beta.write_bytes(text.replace(b"five\n", b"five\r\n"))
    assert taken(refreshed(applied)) == [("srt/beta.py", 5, "0001-hook.patch")]


def test_an_overlay_file_edited_on_both_sides(applied: Checkout) -> None:
    ours = applied.root / "overlay/srt/treeverify/attention/ops.py"
    ours.write_text(ours.read_text() + "# in the checkout\n")
    edit(applied, "srt/treeverify/attention/ops.py", "return x", "return x + 1")
    assert "attention/ops.py was edited in the tree, and in this checkout since" in refusal(applied)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("two\nlines.py", r"'srt/treeverify/two\nlines.py' holds a backslash or a character that is not printed"),
        ("esc\x1b[31m.py", r"'srt/treeverify/esc\x1b[31m.py' holds a backslash or a character that is not printed"),
        ("\udcff.py", r"'srt/treeverify/\udcff.py' holds a backslash or a character that is not printed"),
        ("attention/Ops.py", "srt/treeverify/attention/Ops.py and srt/treeverify/attention/ops.py are one file where"),
    ],
)
def test_names_that_no_overlay_takes(applied: Checkout, name: str, told: str) -> None:
    """Written all the same, they would leave a checkout that no command reads; in a checkout they are told alike."""
    (applied.package / "srt/treeverify" / name).write_text("x = 1\n")
    refused = refusal(applied)
    assert told in refused and "nothing was written. Rename" in refused and "\x1b" not in refused
    (applied.root / "overlay/srt/treeverify" / name).write_text("x = 1\n")
    run = applied.run("list")
    assert run.returncode == 2 and told in run.stderr and "Traceback" not in run.stderr


def test_what_waits_for_apply_is_told_and_left(applied: Checkout) -> None:
    """The patches went on, and the tree was edited in another file."""
    second = applied.pin / "0002-more.patch"
    second.write_text(second.read_text().replace("and a half", "and a third"))
    edit(applied, "srt/alpha.py", "if hooked():", "if hooked(bs):")
    assert refreshed(applied, state="drifted").left == ["srt/beta.py"]
    assert "and a third" in second.read_text()
    assert applied.run("apply", "--no-build").returncode == 0
    assert "and a third" in (applied.package / "srt/beta.py").read_text()
    assert "hooked(bs)" in (applied.package / "srt/alpha.py").read_text()


def test_a_run_killed_between_patches_and_manifest_is_finished(
    applied: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(applied, "srt/beta.py", "line five\n", "line V\n")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("applier.refresh.carry_out", killed)
        with pytest.raises(KeyboardInterrupt):
            refresh_tree(Layout(applied.root), locate(applied.package), Wish())
    assert not refreshed(applied).writes, "only the manifest was left to do"


def test_trees_that_have_no_edits_of_patches(checkout: Checkout, applied: Checkout) -> None:
    assert "is not patched" in refusal(checkout)
    with pytest.raises(UsageError, match="patched for v1, not for v2"):
        refresh_tree(Layout(applied.root), locate(applied.package), Wish(), "v2")


@pytest.fixture
def fork(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A fork with a line more in front, one less, and one of its own, patched by a merge; the release is at hand."""
    checkout.keep_wheel()
    monkeypatch.setattr("applier.obtain.cache_dir", lambda: checkout.cache)
    monkeypatch.setattr("applier.released._wheels", {})
    beta = checkout.package / "srt/beta.py"
    beta.write_text("# a fork's\n" + BETA.replace("line 15\n", "").replace("line 20\n", "line twenty\n"))
    assert checkout.run("apply", "--no-build", "--3way").returncode == 0
    return checkout


def test_edits_in_a_fork_go_into_the_release_s_patches(fork: Checkout) -> None:
    """Without what the fork is; its own tree is then what a merge of the new patches makes of it."""
    trees = tree_hash(fork.root / "patches"), tree_hash(fork.package)
    assert fork.run("refresh").stdout == "v1: nothing to refresh\n"
    assert (tree_hash(fork.root / "patches"), tree_hash(fork.package)) == trees
    edit(fork, "srt/alpha.py", "if hooked():", "if hooked(bs):")
    edit(fork, "srt/beta.py", "line five\n", "line V\n")
    edit(fork, "srt/beta.py", "line 28\n", "line 28\nline 28 and a half\n")
    before = (fork.pin / "pin.toml").read_bytes()
    run = fork.run("refresh")
    assert run.returncode == 0, run.stderr
    assert "srt/beta.py:6 -> 0001-hook.patch (changes its lines)\n" in run.stdout
    assert "srt/beta.py:29 -> 0002-more.patch" in run.stdout
    both = "".join((fork.pin / name).read_text() for name in ("0001-hook.patch", "0002-more.patch"))
    assert "+line V\n" in both and "+line 28 and a half\n" in both and "fork" not in both and "twenty" not in both
    assert "@@ -26,8 +26,10 @@" in both, "lines count in the release"
    assert (fork.pin / "pin.toml").read_bytes() == before
    assert fork.run("status").returncode == 0
    patched = tree_hash(fork.package)
    assert fork.run("apply", "--no-build").returncode == 0 and tree_hash(fork.package) == patched
    assert fork.run("revert").returncode == 0
    assert (fork.package / "srt/beta.py").read_text().startswith("# a fork's\nline 1\n")
    assert fork.run("apply", "--no-build", "--3way").returncode == 0 and tree_hash(fork.package) == patched


@pytest.mark.parametrize(
    ("old", "new"),
    [("line twenty\n", "line XX\n"), ("line twenty\n", "line 20\n")],
    ids=["a line of the fork's", "to the release's line"],
)
def test_an_edit_of_a_fork_s_own_lines_is_refused_with_the_way_out(fork: Checkout, old: str, new: str) -> None:
    edit(fork, "srt/beta.py", old, new)
    told = refusal(fork)
    assert "edits stand where they differ from it" in told and told.endswith("\nsrt/beta.py")
    assert "apply.py port" in told


def test_a_fork_is_brought_up_to_date_by_a_merge_again(fork: Checkout) -> None:
    """As its first time: `apply` alone, as status advises, with the same patches and with newer ones."""
    (fork.root / "overlay/srt/treeverify/more.py").write_text("")
    second = fork.pin / "0002-more.patch"
    for half in ("a half", "a third"):
        second.write_text(second.read_text().replace("a half", half))
        status = json.loads(fork.run("status", "--json").stdout)
        assert status["state"] == "drifted" and status["advice"][0]["command"].startswith("python3 apply.py apply ")
        run = fork.run("apply", "--no-build")
        assert run.returncode == 0 and fork.run("status").returncode == 0, run.stderr
        assert f"line 30 and {half}\n" in (fork.package / "srt/beta.py").read_text()


# All or nothing.


def steps(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Every call that changes the disk fails from the n-th on."""
    count = iter(range(left))

    def failing(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            if next(count, None) is None:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return wrapper

    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


def test_an_interruption_anywhere_leaves_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"patches/a": b"1", "patches/b": b"2", "overlay/c": b"3"}
    writes = {"patches/a": b"one", "patches/b": None, "overlay/c": b"three", "overlay/d/e": b"four"}
    new = {path: data for path, data in {**old, **writes}.items() if data is not None}
    outcomes = []
    for left in range(40):
        root = tmp_path / str(left)
        for path, data in old.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        with monkeypatch.context() as patch:
            steps(patch, left)
            try:
                replace_all(root, root / "patches", writes)
                done = True
            except KeyboardInterrupt:
                done = False
        settle(root, root / "patches")
        files = root.rglob("*")
        found = {str(p.relative_to(root)): p.read_bytes() for p in files if p.is_file() and not p.name.startswith(".")}
        assert found in (old, new), left
        assert not (root / "patches/.changes.treeverify-new").exists()
        outcomes.append(found == new)
        if done:
            break
    assert outcomes == sorted(outcomes) and outcomes.count(True) > 2 and outcomes.count(False) > 2


# The parts.


def test_every_patch_of_the_checkout_is_put_together_again(pin: Pin, stock_tree: Path) -> None:
    """The text parser is exact, and git's diff of a patch's two sides is the patch: no noise in either direction."""
    patches = load_patches(pin)
    content = {path: (stock_tree / "sglang" / path).read_bytes() for path in patches.touched}
    for patch in patches.patches:
        text = (pin.folder / patch.name).read_bytes().decode()
        parsed = parse(patch.name, text)
        assert parsed.render() == text and list(parsed.sections) == [file.path for file in patch.files]
        alone = type(patches)((patch,), "")
        after = apply_patches(alone, content.get)
        for path, section in parsed.sections.items():
            assert unified(f"{parsed.prefix}{path}", content[path], after[path]).decode() == section
        content |= after


def test_lines_that_look_like_a_diff_s_own() -> None:
    """A removed `-- a` and an added `++ b`, and a file without a newline at its end."""
    old, new = b"-- a/x\nsame\nend", b"++ b/x\nsame\nend\n"
    section = unified("srt/x.py", old, new).decode()
    text = f"Touches: srt/x.py, srt/y.py\n\n{section}{unified('srt/y.py', new, old).decode()}"
    parsed = parse("p", text)
    assert list(parsed.sections) == ["srt/x.py", "srt/y.py"] and parsed.sections["srt/x.py"] == section
    assert parsed.render() == text


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d\n", "e\n"]), max_size=12)


@st.composite
def files_and_edits(draw: st.DrawFn) -> tuple[list[list[str]], list[str]]:
    """A file through up to three patches, and the edited file."""
    lines = draw(LINES)
    through = [lines]
    for _ in range(draw(st.integers(1, 3))):
        through.append(draw(changed_lines(through[-1])))
    return through, draw(changed_lines(through[-1]))


@st.composite
def changed_lines(draw: st.DrawFn, lines: list[str]) -> list[str]:
    result = list(lines)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(result)))
        stop = draw(st.integers(start, min(len(result), start + 2)))
        result[start:stop] = draw(LINES.map(lambda new: new[:2]))
    return result


def patch_between(old: list[str], new: list[str]) -> FilePatch | None:
    hunks = tuple(
        Hunk(a0 + (a1 > a0), tuple(old[a0:a1]), tuple(new[b0:b1])) for a0, a1, b0, b1 in differences(old, new)
    )
    return FilePatch("f", hunks) if hunks else None


def differences(old: list[str], new: list[str]) -> Iterator[tuple[int, int, int, int]]:
    from difflib import SequenceMatcher

    for kind, *span in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield span[0], span[1], span[2], span[3]


@given(files_and_edits())
def test_the_last_stage_is_the_edited_file_and_the_first_the_release(case: tuple[list[list[str]], list[str]]) -> None:
    """Whatever the patches and edits; and each stage before an edit's owner is as it was."""
    through, edited = case
    files = [patch_between(old, new) for old, new in zip(through, through[1:], strict=False)]
    stage = stages(files, through[0])
    assert stage.lines == through
    edits = [Edit(a0, a1, tuple(edited[b0:b1])) for a0, a1, b0, b1 in differences(through[-1], edited)]
    owners = [found.patch if (found := owner(stage, item)) else len(files) - 1 for item in edits]
    names = [str(i) for i in range(len(files))]
    result = with_edits(stage, edits, owners, names).lines
    assert result[0] == through[0] and result[-1] == edited
    first = min(owners, default=len(files))
    assert result[: first + 1] == through[: first + 1]
    last = with_edits(stage, edits, [len(files) - 1] * len(edits), names).lines
    assert last[:-1] == through[:-1] and last[-1] == edited


def test_an_edit_between_two_patches_goes_to_the_nearer() -> None:
    base = [f"{i}\n" for i in range(20)]
    one = FilePatch("f", (Hunk(3, ("2\n",), ("two\n",)),))
    two = FilePatch("f", (Hunk(17, ("16\n",), ("sixteen\n", "more\n")),))
    stage = stages([one, None, two], base)
    found = [owner(stage, Edit(at, at + 1, ("x\n",))) for at in (2, 3, 8, 12, 16, 17, 19)]
    assert [item and item.patch for item in found] == [0, 0, 0, 2, 2, 2, 2]
    assert owner(stages([None], base), Edit(1, 2, ())) is None
    with pytest.raises(DriftError, match="comes after one"):
        with_edits(stage, [Edit(17, 18, ())], [0], ["one", "none", "two"])


def test_pin_and_series_keep_comments_and_order() -> None:
    blobs = '"b" = "01"  # two\n"d" = "02"\n'
    text = f'[pin]\nname = "v"\n\n# why\n[blobs]  # git\n{blobs}\n# the contract\n[[dtype]]\nx = 1\n'
    assert with_blobs(text, {"b": "01", "d": "02"}) == text
    assert with_blobs(text, {"b": "01", "d": "03", "c": "04", "a": "05", "e": "06"}) == text.replace(
        blobs, '"a" = "05"\n"b" = "01"  # two\n"c" = "04"\n"d" = "03"\n"e" = "06"\n'
    )
    assert with_blobs(text, {}) == text.replace(blobs, "")
    series = f"# all\n1.patch\n{waiting('2.patch')}\n3.patch  # last\n"
    assert settled(series, "2.patch") == "# all\n1.patch\n2.patch\n3.patch  # last\n"
    assert without(series, "3.patch") == f"# all\n1.patch\n{waiting('2.patch')}\n"
    assert settled("1.patch\n", "2.patch") == "1.patch\n2.patch\n"


# The real release.


@pytest.fixture
def real(patched_tree: Path, pin: Pin, tmp_path: Path) -> tuple[Layout, Tree]:
    """A checkout's patches and overlay, and of the patched package what refresh looks at."""
    layout = Layout(tmp_path / "checkout")
    for folder in (CHECKOUT.patches, CHECKOUT.overlay):
        shutil.copytree(folder, layout.root / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "sglang"
    for path in pin.blobs:
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(patched_tree / "sglang" / path, package / path)
    shutil.copytree(patched_tree / "sglang" / HOME, package / HOME)
    (package / "__init__.py").touch()
    return layout, locate(package)


def real_refresh(layout: Layout, tree: Tree, pin: Pin) -> Refresh:
    manifest = load_manifest(tree)
    assert manifest is not None
    release = load_release(layout, load_pin(layout.patches / pin.name))
    return plan_refresh(layout, tree, release, manifest, Wish())


def test_the_real_release_untouched(real: tuple[Layout, Tree], pin: Pin) -> None:
    plan = real_refresh(*real, pin)
    assert not plan.writes and not plan.taken and not plan.left


def test_a_line_in_every_file_of_the_real_release(real: tuple[Layout, Tree], pin: Pin) -> None:
    """Every patch gets its line; of what it was, only the counts in the headers of hunks change."""
    layout, tree = real
    touched = [file for patch in load_patches(pin).patches for file in patch.files]
    for count, file in enumerate(touched):
        hunk = file.hunks[0]
        before = sum(other.path == file.path for other in touched[:count])  # lines put in above
        first = next(i for i, (a, b) in enumerate(zip(hunk.old, hunk.new, strict=False)) if a != b)
        lines = tree.path(file.path).read_text().splitlines(keepends=True)
        lines.insert(hunk.start - 1 + first + before, f"# of {file.path}\n")
        tree.path(file.path).write_text("".join(lines))
    plan = real_refresh(layout, tree, pin)
    names = {f"patches/{pin.name}/{path.name}" for path in pin.folder.glob("*.patch")}
    assert set(plan.writes) == names and len(plan.taken) == len(touched)
    gained = []
    for name in names:
        old, new = (layout.root / name).read_text().splitlines(), (plan.writes[name] or b"").decode().splitlines()
        lost = [line for line in old if line not in new]
        assert all(line.startswith("@@ -") for line in lost), lost
        gained += [line for line in new if line not in old and not line.startswith("@@ -")]
    assert sorted(gained) == sorted(f"+# of {file.path}" for file in touched)


def test_an_emptied_file_is_refused_by_its_name(applied: Checkout) -> None:
    (applied.package / "srt/beta.py").write_text("")
    assert "srt/beta.py is empty now" in refusal(applied)


def test_what_refresh_says_fits_a_terminal(applied: Checkout) -> None:
    edit(applied, "srt/beta.py", "line 28\n", "line 28.\n")
    (applied.package / "srt/treeverify/attention/a_name_that_is_rather_long.py").write_text("x = 1\n")
    (applied.package / "srt/treeverify/__init__.py").unlink()
    run = applied.run("refresh")
    assert run.returncode == 0 and max(map(len, run.stdout.splitlines())) <= 80, run.stdout
    assert "srt/beta.py:28 -> 0002-more.patch (2 lines from its nearest hunk)\n" in run.stdout
    assert "a_name_that_is_rather_long.py:1\n  -> overlay/srt/" in run.stdout
    assert "apply` brings: srt/treeverify/__init__.py" in run.stderr
    assert (applied.root / "overlay/srt/treeverify/__init__.py").exists()
