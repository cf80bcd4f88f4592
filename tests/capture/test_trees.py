# SPDX-License-Identifier: Apache-2.0
"""The lint on the real release: what it must find there, patched and not; tests/patches asks it of every pin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import capture_lint
import pytest
from applier.errors import UsageError
from applier.layout import CHECKOUT
from applier.patchset import load_patches
from applier.pin import Pin
from capture.config import Config, load_allowed, load_config
from capture.lint import Report, lint
from capture.report import render

SRT = "srt/"
KNOWN = {
    ("srt/layers/attention/flashinfer_mla_backend.py", 416, "host-read", "capture"),
    ("srt/layers/attention/flashinfer_mla_backend.py", 575, "pool-cast", "captured"),
    ("srt/layers/attention/flashinfer_mla_backend.py", 882, "plan", "metadata"),
    ("srt/layers/attention/triton_backend.py", 362, "alloc", "metadata"),
    ("srt/layers/attention/triton_backend.py", 372, "size", "metadata"),
    ("srt/layers/attention/triton_backend.py", 800, "alloc", "metadata"),
    ("srt/model_executor/cuda_graph_runner.py", 1095, "host-read", "capture"),
    ("srt/models/deepseek_common/attention_forward_methods/forward_mla.py", 530, "cat", "captured"),
    ("srt/models/deepseek_common/attention_forward_methods/forward_mla.py", 531, "cat", "captured"),
    ("srt/speculative/dflash_info.py", 238, "loop", "worker"),
    ("srt/speculative/dflash_info.py", 264, "alloc", "metadata"),
    ("srt/speculative/dflash_info.py", 272, "alloc", "metadata"),
    ("srt/speculative/dflash_info.py", 276, "alloc", "metadata"),
    ("srt/speculative/dflash_info.py", 298, "cat", "metadata"),
    ("srt/speculative/dflash_info.py", 386, "host-read", "worker"),
    ("srt/speculative/dflash_info.py", 440, "mask-index", "worker"),
    ("srt/speculative/dflash_info.py", 441, "mask-index", "worker"),
    ("srt/speculative/dflash_worker.py", 599, "host-read", "worker"),
    ("srt/speculative/dflash_worker.py", 639, "host-read", "worker"),
}
"""In v0.5.12.post1, read off its source by hand before there was a lint."""


@pytest.fixture(scope="module")
def config(pin: Pin) -> Config:
    return load_config(pin.folder)


@pytest.fixture(scope="module")
def touched(pin: Pin) -> list[str]:
    return load_patches(pin).touched


@pytest.fixture(scope="module")
def stock(stock_tree: Path, config: Config, touched: list[str]) -> Report:
    return lint(stock_tree / "sglang", config, touched)


@pytest.fixture(scope="module")
def patched(patched_tree: Path, config: Config, touched: list[str]) -> Report:
    return lint(patched_tree / "sglang", config, touched)


def test_stock_has_what_is_known_of_it(stock: Report) -> None:
    found = {(one.file, one.line, one.rule, one.region) for one in stock.findings}
    assert KNOWN <= found, KNOWN - found
    assert not stock.patched and not stock.allowed and not stock.ok


def test_stock_has_every_wait_that_the_docs_list(stock: Report) -> None:
    text = (CHECKOUT.root / "docs" / "host-syncs.md").read_text()
    rows = re.findall(r"(speculative/\w+\.py):([\d, -]+\d)", "\n".join(re.findall(r"^\|.*\|$", text, re.MULTILINE)))
    listed = {(SRT + file, int(re.split(r"[,-]", lines)[0])) for file, lines in rows}
    listed |= {(SRT + file, int(line)) for file, lines in rows if "," in lines for line in lines.split(",")}
    assert len(listed) >= 20
    assert listed <= {(one.file, one.line) for one in stock.findings}


def test_the_graphs_and_their_metadata_need_next_to_no_leave(patched: Report) -> None:
    """Outside the workers and the capture at start-up: no wait, no copy, no plan; buffers of eager passes may grow."""
    rules = {(one.region, one.rule) for one, _ in patched.allowed if one.region in ("captured", "metadata")}
    assert rules == {("captured", "cat"), ("captured", "size"), ("metadata", "alloc")}


def test_the_overlay_is_followed_to_its_launches(patched: Report) -> None:
    followed = {place.removeprefix("srt/treeverify/") for place in patched.followed}
    wanted = {f"attention/ops.py::_{op}_cuda" for op in ("prep", "plan", "verify")}
    wanted |= {f"ddtree/ops.py::_{op}_cuda" for op in ("build", "walk")}
    wanted |= {f"ddtree/head_ops.py::_{op}_cuda" for op in ("lists", "merge")}
    wanted |= {"attention/launch.py::launch", "attention/verifier.py::Verifier.replay", "ddtree/sampling.py::predict"}
    wanted |= {"attention/verifier.py::Verifier.refresh", "attention/packed.py::PackedPrep.__call__"}
    wanted |= {"attention/packed.py::PackedVerify.__call__", "ddtree/budget/acceptance.py::Acceptance.observe"}
    wanted |= {"ddtree/draft_pass.py::DraftPass.__call__", "ddtree/draft_kv.py::DraftKV._write"}
    assert wanted <= followed, wanted - followed


HURTS = {
    "attention/verifier.py": ("raw_bs, self.raw_bs = self.raw_bs, None", "int(seq_lens.sum())", "host-read"),
    "attention/buffers.py": ("heads = layer.tp_q_head_num", "q.sum().item()", "host-read"),
    "attention/ops.py": ("a = PrepArgs(*args)", "a.seq_lens.tolist()", "host-read"),
    "attention/packed.py": ("p = self._params", "seq_lens.tolist()", "host-read"),
    "attention/launch.py": ("entry, index = abi.entry(what), device.index", "torch.cuda.synchronize()", "synchronize"),
    "ddtree/penalties.py": ("path = tree.visible()", "tree.tokens[tree.depths > 0]", "mask-index"),
    "ddtree/tree.py": ("row = 2 * deep + 2", "torch.tensor([1], device=predicted.device)", "upload"),
}


def test_what_is_put_into_the_overlay_is_found(
    patched_tree: Path, tmp_path: Path, config: Config, touched: list[str], patched: Report
) -> None:
    """Negative control: one forbidden call in each of several files, deep below the entries."""
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    for path in [*(patched_tree / "sglang").iterdir(), *(patched_tree / "sglang/srt").iterdir()]:
        if path.name not in ("srt", "treeverify"):
            (package / path.relative_to(patched_tree / "sglang")).symlink_to(path)
    shutil.copytree(patched_tree / "sglang/srt/treeverify", package / "srt/treeverify")
    for name, (before, call, _) in HURTS.items():
        file = package / "srt/treeverify" / name
        text = file.read_text()
        line = next(line for line in text.splitlines() if line.strip() == before)
        indent = line[: len(line) - len(line.lstrip())]
        file.write_text(text.replace(line, f"{indent}{call}\n{line}", 1))
    report = lint(package, config, touched)
    found = {(one.file.removeprefix("srt/treeverify/"), one.source, one.rule) for one in report.findings}
    assert found == {(name, call, rule) for name, (_, call, rule) in HURTS.items()}


def test_an_entry_that_matches_nothing_is_an_error(patched_tree: Path, config: Config, touched: list[str]) -> None:
    region = next(one for one in config.regions if one.name == "capture")
    entries = [one for one in config.allowed if one.function == "CudaGraphRunner.capture_one_batch_size"]
    first, *others = entries
    report = lint(patched_tree / "sglang", Config(config.follow, (region,), tuple(others)), touched)
    assert not report.ok and {(one.rule, one.source) for one in report.findings} == {(first.rule, first.source)}
    moved = replace(first, function="gone")
    report = lint(patched_tree / "sglang", Config(config.follow, (region,), (*entries, moved)), touched)
    assert not report.ok and report.stale == [moved] and not report.findings
    assert f"capture-allow.txt:{first.line}: matches nothing" in render(report)


def test_an_entry_point_that_is_gone_is_an_error(patched_tree: Path, config: Config, touched: list[str]) -> None:
    region = config.regions[0]
    gone = replace(region, entries=("srt/layers/attention/triton_backend.py::Nobody.forward",))
    with pytest.raises(UsageError) as refused:
        lint(patched_tree / "sglang", Config(config.follow, (gone,), ()), touched)
    assert refused.value.details == ["srt/layers/attention/triton_backend.py::Nobody.forward (captured)"]


def test_the_list_gives_a_reason_a_line(tmp_path: Path, pin: Pin) -> None:
    entries = load_allowed(pin.folder / "capture-allow.txt")
    assert entries and all(len(entry.reason.split()) > 2 for entry in entries)
    assert len({(e.rule, e.file, e.function, e.source) for e in entries}) == len(entries)
    wrong = {"cat | srt/m.py | f | torch.cat(x)": "expected", "cats | a | b | c | d": "no rule 'cats'"}
    for line, message in wrong.items():
        (tmp_path / "allow.txt").write_text(f"# a comment\n\n{line}\n")
        with pytest.raises(UsageError, match=f"allow.txt:3: {message}"):
            load_allowed(tmp_path / "allow.txt")
    (tmp_path / "allow.txt").write_text("branch | srt/m.py | f | a | b | since it is one\n")
    assert load_allowed(tmp_path / "allow.txt")[0].source == "a | b"


def test_report_for_people(stock: Report, patched: Report) -> None:
    text = render(stock)
    assert "srt/layers/attention/triton_backend.py:372: size\n  torch.empty(kv_indptr[-1]" in text
    assert re.search(r"calls DFlashVerifyInput.verify at\s+srt/speculative/dflash_worker.py:12", text)
    counts = f"{len(stock.followed)} functions followed, {len(stock.findings)} findings"
    assert text.endswith(f"unpatched (nothing is allowed there): {counts}")
    assert "allowed: the accepted tokens: the one copy of a DDTREE step" in render(patched, show_allowed=True)
    for line in [*text.splitlines(), *render(patched, show_allowed=True).splitlines()]:
        assert len(line) <= 80 or " " not in line.strip(), "only a path may have no place to break"


def test_report_for_scripts(patched_tree: Path, patched: Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert capture_lint.main(["--sglang", str(patched_tree), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["patched"] and not report["findings"]
    assert report["followed"] == patched.followed
    one = next(one for one in report["allowed"] if one["function"] == "DraftTree.walk")
    assert one["rule"] == "host-read" and one["reason"] and one["path"][0]["function"].startswith("DDTreeWorker.")
    assert one["path"][-1]["line"] and one["why"]


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    command = [sys.executable, CHECKOUT.root / "scripts/capture_lint.py", "--sglang", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and "no sglang package there" in run.stderr
