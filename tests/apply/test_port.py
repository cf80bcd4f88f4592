# SPDX-License-Identifier: Apache-2.0
"""A pin for another release: the real release with what releases do to it, and the small one from port to finish."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from applier.checkoutfiles import make_folder
from applier.contract import check_contract, problems_of
from applier.errors import DriftError, UsageError
from applier.fit import CLEAN, CONFLICT, MERGES, UPSTREAM
from applier.layout import CHECKOUT, Layout
from applier.overlayimports import missing_imports
from applier.patchset import apply_patches
from applier.pin import Pin, load_pin
from applier.port import Port, plan_port, require_stock
from applier.portreport import report
from applier.rederive import DIFFERS, HOLDS, LOST, MOVED, rederive
from applier.release import Release, load_release
from applier.settling import unsettled
from applier.tree import Tree, locate
from checkout import BETA, Checkout, tree_hash

MLA = "srt/layers/attention/flashinfer_mla_backend.py"
TRITON = "srt/layers/attention/triton_backend.py"
DRAFT = "srt/speculative/draft_utils.py"
DRAFTS = "srt/speculative/drafts/backends.py"
MIXIN = "srt/observability/scheduler_metrics_mixin.py"
INFO = "srt/speculative/eagle_info.py"
INFOS = "srt/speculative/infos.py"
CONTEXT = b"        self.prefill_cuda_graph_metadata = {}  # For verify\n"
WIDTH = b"(max_bs * self.max_context_len,),\n                dtype=torch.int32,"


@pytest.fixture(scope="module")
def old(pin: Pin) -> Release:
    return load_release(CHECKOUT, pin)


@pytest.fixture(scope="module")
def stock(old: Release, stock_tree: Path) -> dict[str, bytes]:
    """What the patches and the contract are about, of the real release."""
    paths = {*old.patches.touched, *(row.file for row in old.pin.dtypes)}
    return {path: (stock_tree / "sglang" / path).read_bytes() for path in paths}


@pytest.fixture(scope="module")
def newer(old: Release, stock: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The next release: lines moved, one changed, one patch merged, two files under new names, a dtype wider."""
    files = {path: b"# newer\n" + data for path, data in stock.items()}
    assert CONTEXT in stock[MLA] and stock[MLA].count(WIDTH) == 1
    files[MLA] = files[MLA].replace(CONTEXT, CONTEXT.replace(b"verify", b"other things"))
    files[MLA] = files[MLA].replace(WIDTH, WIDTH.replace(b"int32", b"int64"))
    files[MIXIN] = b"# newer\n" + apply_patches(old.patches, stock.get)[MIXIN]
    files[DRAFTS], files[INFOS] = files.pop(DRAFT), files.pop(INFO)
    files["__init__.py"] = b""
    files["_version.py"] = b"__version__ = version = '0.6.0'\n"
    package = tmp_path_factory.mktemp("newer") / "sglang"
    for path, data in files.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(data)
    (package.parent / "sglang-0.6.0.dist-info").mkdir()
    (package.parent / "sglang-0.6.0.dist-info/METADATA").write_text("Name: sglang\nRequires-Python: >=3.12\n")
    return locate(package)


@pytest.fixture(scope="module")
def port(old: Release, newer: Tree, stock: dict[str, bytes]) -> Port:
    return plan_port(old, newer, None, stock.get, report)


@pytest.fixture
def new(port: Port, tmp_path: Path) -> Pin:
    """The folder that port makes."""
    make_folder(tmp_path / port.name, port.files, load_pin)
    return load_pin(tmp_path / port.name)


def test_every_patch_is_carried_as_far_as_it_goes(port: Port) -> None:
    assert [patch.state for patch in port.fit.patches] == [CONFLICT, MERGES, MERGES, MERGES, UPSTREAM, MERGES, MERGES]
    assert [(name[:4], file.path, hunk) for name, file, hunk in port.waiting] == [("0001", MLA, 2)]
    assert port.moved[DRAFT].now == DRAFTS and port.moved[DRAFT].followed


def test_the_new_folder_is_a_pin_that_fits_the_release(port: Port, new: Pin, newer: Tree) -> None:
    """Its patches go in exactly, and give what the merges gave."""
    release = load_release(CHECKOUT, new)
    assert [patch.name[:4] for patch in release.patches.patches] == ["0001", "0002", "0003", "0004", "0006", "0007"]
    assert {patch.header["Pin"] for patch in release.patches.patches} == {"v0.6.0"}
    assert release.patches.patches[2].header["Touches"] == DRAFTS
    made = apply_patches(release.patches, newer.read)
    assert made == {port.path(path): data for path, data in port.fit.content.items() if path != MIXIN}
    assert b"self.tree_verify = treeverify.attach" not in made[MLA], "the hunk to settle"
    assert b"tree_verify.eager(forward_batch)" in made[MLA]
    assert (new.pypi, new.requires_python, new.default, new.commit) == ("0.6.0", ">=3.12", False, None)
    assert set(new.blobs) == {port.path(path) for path in port.release.pin.blobs}


def test_the_contract_keeps_what_the_kernels_read(port: Port, new: Pin, newer: Tree) -> None:
    """Rows that hold go on; what moved is followed; a wider dtype is told and not taken over."""
    states = [(item.row.backend, item.row.path, item.row.name, item.state) for item in port.contract]
    odd = [(*row[:3], state) for *row, state in states if state not in (HOLDS, MOVED)]
    assert odd == [("flashinfer_mla", "graph", "kv_indices", DIFFERS)]
    assert {item.row.file for item in port.contract if item.state == MOVED} == {INFOS}
    assert len(new.dtypes) == len(port.release.pin.dtypes)
    assert [(row.name, row.dtype, row.site) for row in new.dtypes] == [
        (row.name, row.dtype, row.site) for row in port.release.pin.dtypes
    ]
    (problem,) = problems_of(check_contract(new, newer.read))
    assert "kv_indices is int64, the contract says int32" in problem
    assert f"# to settle: {problem}\n[[dtype]]\n" in (new.folder / "pin.toml").read_text()


def test_a_site_that_is_gone_is_lost(old: Release, newer: Tree, stock: dict[str, bytes]) -> None:
    row = replace(old.pin.dtypes[0], site="NoSuch.method")
    (found,) = rederive(replace(old.pin, dtypes=(row,)), newer, {})
    assert found.state == LOST and "no class NoSuch" in found.note


def test_what_a_person_must_settle_is_written_down(port: Port, new: Pin) -> None:
    text = (new.folder / "PORT.md").read_text()
    assert "0001-flashinfer-mla-target-verify.patch: 1 of 8 hunks to settle" in text
    assert "0005-ddtree-metrics.patch: the release has it already" in text
    assert "+        self.tree_verify = treeverify.attach(self, model_runner, skip_prefill)" in text
    assert "For other things" in text.replace("\n", "")
    todo = (new.folder / "0001-flashinfer-mla-target-verify.patch.todo").read_text()
    assert todo.count("@@ -") == 1 and "+        self.tree_verify = treeverify.attach(" in todo
    assert port.imports, "the overlay imports much that this small package has not"
    left = [point.split(": ", 1) for point in unsettled(new.folder)]
    assert len(left) == port.open, "one count, whoever is asked"
    marks = [mark.partition(":")[0] for mark, _ in left]
    assert marks[:2] == ["0001-flashinfer-mla-target-verify.patch.todo", "pin.toml"] and set(marks[2:]) == {"PORT.md"}
    assert [name for _, name in left[2:]] == port.imports
    series = (new.folder / "series").read_text()
    assert "# 0005-ddtree-metrics.patch: v0.6.0 has it already\n" in series


def test_the_release_itself_leaves_nothing_to_settle(old: Release, stock: dict[str, bytes], stock_tree: Path) -> None:
    """And its patches come out byte for byte, but for the name of the pin; all that the overlay imports is there."""
    same = plan_port(old, locate(stock_tree), "v9", stock.get, report)
    assert same.open == 0 and {patch.state for patch in same.fit.patches} == {CLEAN}
    for patch in old.patches.patches:
        text = (old.pin.folder / patch.name).read_text().replace("Pin: v0.5.12.post1", "Pin: v9")
        assert same.files[patch.name].decode() == text
    assert not [name for name in same.files if name.endswith(".todo")]
    for path in ("capture.toml", "capture-allow.txt", "overlay/srt/treeverify/compat.py"):
        assert same.files[path] == (old.pin.folder / path).read_bytes()


def test_names_that_the_release_has_not(stock_tree: Path) -> None:
    tree = locate(stock_tree)
    source = (
        b"import sglang.srt.gone\nfrom sglang.srt.layers.dp_attention import get_attention_tp_size, is_gone\n"
        b"from sglang.srt.treeverify import gates\nfrom sglang.srt.layers import attention, nothing\n"
        b"from sglang.srt.environ import envs\nimport torch\n"
    )
    assert missing_imports(tree, {"srt/treeverify/x.py": source, "srt/treeverify/x.txt": b"import sglang.no"}) == [
        "srt/treeverify/x.py:1: sglang.srt has no gone",
        "srt/treeverify/x.py:2: sglang.srt.layers.dp_attention has no is_gone",
        "srt/treeverify/x.py:4: sglang.srt.layers has no nothing",
    ]


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden"])
def test_names_that_are_no_folder_s(old: Release, newer: Tree, stock: dict[str, bytes], name: str) -> None:
    with pytest.raises(UsageError, match="can't be named"):
        plan_port(old, newer, name, stock.get, report)


# From the command to a finished pin.


def run_port(checkout: Checkout, to: Path) -> dict[str, object]:
    command = [*checkout.command("port")[:2], "port", "--from", "v1", "--to", str(to), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, env=checkout.env(), check=False)
    print(run.stderr)
    return {"code": run.returncode, "stderr": run.stderr, **(json.loads(run.stdout) if run.stdout else {})}


@pytest.fixture
def second(checkout: Checkout) -> Path:
    """Another release beside the first: a hunk of the first patch conflicts, the whole second does."""
    checkout.keep_wheel()
    package = checkout.package.parent.parent / "second/sglang"
    shutil.copytree(checkout.package, package)
    (package / "srt/beta.py").write_text(BETA.replace("line 6\n", "line VI\n").replace("line 31\n", "line XXXI\n"))
    (package / "_version.py").write_text("__version__ = version = '2.0'\n")
    return package


def says_unfinished(checkout: Checkout, state: str, points: int, way: str) -> None:
    """list, status and doctor, for people and for scripts; the first advice is one that a pin like that takes."""
    things = "thing" if points == 1 else "things"
    told = f"unfinished: v2.0 is no finished pin: {points} {things} to settle, see PORT.md in its folder"
    assert told in " ".join(checkout.run("status").stdout.split())
    assert told in " ".join(checkout.run("list").stdout.partition("\nv2.0\n")[2].split())
    assert f"{state} (v2.0, unfinished)" in checkout.run("doctor").stdout
    status = json.loads(checkout.run("status", "--json").stdout)
    assert (status["state"], len(status["to_settle"])) == (state, points)
    assert status["advice"][0]["command"] == f"python3 apply.py {way.format(checkout.package)}"
    pins = {pin["name"]: pin["to_settle"] for pin in json.loads(checkout.run("list", "--json").stdout)}
    assert pins == {"v1": [], "v2.0": status["to_settle"]}
    doctor = json.loads(checkout.run("doctor", "--json").stdout)
    assert doctor["tree"]["to_settle"] == status["to_settle"]
    assert "is unfinished and does not serve yet" in doctor["mend"][-1]["problem"]


def test_port_and_refresh_make_a_finished_pin(checkout: Checkout, second: Path) -> None:
    before = tree_hash(second)
    told = run_port(checkout, second)
    assert (told["code"], told["pin"], told["to_settle"]) == (1, "v2.0", 2) and tree_hash(second) == before
    folder = checkout.root / "patches/v2.0"
    assert (folder / "series").read_text() == "0001-hook.patch\n# to settle: 0002-more.patch\n"
    with pytest.raises(UsageError, match="exists"):  # never over what somebody began to settle
        make_folder(folder, {"pin.toml": b""}, load_pin)

    checkout.package = second
    assert unsettled(folder) == [
        "0001-hook.patch.todo:12: a hunk that did not go in",
        "0002-more.patch.todo:12: a hunk that did not go in",
    ]
    says_unfinished(checkout, "clean", 2, "apply --sglang {} --no-build --force")
    refused = checkout.run("apply", "--no-build")
    assert refused.returncode == 1 and "v2.0 is no finished pin: 2 things to settle" in refused.stderr
    assert checkout.run("apply", "--no-build", "--force").returncode == 0
    says_unfinished(checkout, "applied", 2, "refresh --sglang {} --patch NAME")
    refused = checkout.run("serve", "--", "--model-path", "x")
    assert refused.returncode == 1 and "v2.0 is no finished pin, so it does not serve yet\n" in refused.stderr
    assert all(point in refused.stderr for point in unsettled(folder))
    assert "hooked()" in (second / "srt/alpha.py").read_text() and "line 5\n" in (second / "srt/beta.py").read_text()

    beta = second / "srt/beta.py"
    beta.write_text(beta.read_text().replace("line 5\n", "line five\n"))
    run = checkout.run("refresh", "--patch", "0001-hook.patch")
    assert run.returncode == 0, run.stderr
    beta.write_text(beta.read_text().replace("line 30\n", "line 30\nline 30 and a half\n"))
    run = checkout.run("refresh", "--patch", "0002-more.patch")
    assert run.returncode == 0, run.stderr
    assert (folder / "series").read_text() == "0001-hook.patch\n0002-more.patch\n"
    (folder / "0001-hook.patch.todo").unlink()
    says_unfinished(checkout, "applied", 1, "refresh --sglang {} --patch NAME")
    assert "Touches: srt/beta.py\n" in (folder / "0002-more.patch").read_text()
    assert "Pin: v2.0\n" in (folder / "0002-more.patch").read_text()
    for todo in folder.glob("*.todo"):
        todo.unlink()
    assert unsettled(folder) == []
    status = checkout.run("status")
    assert status.returncode == 0 and "unfinished" not in status.stdout
    text = beta.read_text()
    assert "line five\nline VI\n" in text and "line 30 and a half\nline XXXI\n" in text
    assert checkout.run("revert").returncode == 0 and tree_hash(second) == before
    release = load_release(Layout(checkout.root), load_pin(folder))
    assert apply_patches(release.patches, locate(second).read)["srt/beta.py"].decode() == text


def test_what_port_says_fits_a_terminal(checkout: Checkout, second: Path) -> None:
    """A file that moved far, among names that are no files."""
    (second / "srt/observability_components/folder.py").mkdir(parents=True)
    (second / "srt/nowhere.py").symlink_to("nothing")
    moved = (second / "srt/alpha.py").rename(second / "srt/observability_components/what_alpha_has_become_by_now.py")
    command = [*checkout.command("port")[:2], "port", "--from", "v1", "--to", str(second)]
    run = subprocess.run(command, capture_output=True, text=True, env=checkout.env(), check=False)
    head, *lines, last = run.stdout.splitlines()
    assert run.returncode == 1 and max(map(len, lines)) <= 80 and "things to settle: see" in last
    assert f"srt/alpha.py is gone; {moved.relative_to(second)} has " in " ".join(" ".join(lines).split())


def test_a_folder_that_is_none_is_told_by_the_option_that_named_it(checkout: Checkout, tmp_path: Path) -> None:
    told = run_port(checkout, tmp_path / "none")
    assert (told["code"], told["error"]) == (2, f"--to {tmp_path / 'none'}: no such folder")


def test_a_patched_tree_is_no_release(newer: Tree) -> None:
    require_stock(newer, patched=False)
    with pytest.raises(DriftError, match="is patched"):
        require_stock(newer, patched=True)
