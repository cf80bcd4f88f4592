# SPDX-License-Identifier: Apache-2.0
"""The dtype contract, on the real release, on an older one that differs, and on the ways SGLang writes its tensors."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from applier.layout import cache_dir
from applier.lock import locked
from applier.source_dtypes import NotEstablished, Source
from checkout import ALPHA, ROOT, Checkout

NAMES = {"kv_indptr", "kv_indices", "qo_indptr", "custom_mask", "out_cache_loc", "seq_lens"}


def check(tree: Path) -> tuple[int, dict[str, object], str]:
    command = [sys.executable, ROOT / "scripts/check_dtypes.py", "--sglang", tree, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout), run.stderr


@pytest.fixture(scope="session")
def release_0_5_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sglang 0.5.8 from PyPI."""
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, timeout=900):
        if not list(folder.glob("sglang-0.5.8-*.whl")):
            download = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder,
                "sglang==0.5.8",
            ]
            subprocess.run(download, check=True)
    target = tmp_path_factory.mktemp("sglang-0.5.8")
    with zipfile.ZipFile(next(folder.glob("sglang-0.5.8-*.whl"))) as wheel:
        wheel.extractall(
            target, [name for name in wheel.namelist() if name.startswith("sglang/srt/") or "/" not in name[7:]]
        )
    return target


def test_the_pinned_release_keeps_the_contract(stock_tree: Path) -> None:
    code, report, error = check(stock_tree)
    assert code == 0 and report["ok"], error
    rows = report["rows"]
    assert isinstance(rows, list)
    found = {(row["backend"], row["path"], row["name"]): row["found"] for row in rows}
    for backend in ("flashinfer_mla", "triton"):
        for path in ("eager", "graph"):
            assert {name for b, p, name in found if (b, p) == (backend, path)} >= NAMES
    assert found["triton", "eager", "qo_indptr"] == "int32" and found["triton", "graph", "qo_indptr"] == "int64"
    assert found["triton", "eager", "custom_mask"] == "bool" and found["triton", "graph", "custom_mask"] == "uint8"
    assert (
        found["flashinfer_mla", "eager", "seq_lens"] == "int64"
        and found["flashinfer_mla", "graph", "seq_lens"] == "int32"
    )
    for row in rows:
        text = (stock_tree / "sglang" / row["file"]).read_text().splitlines()[row["line"] - 1]
        assert row["found"] in text or row["found"] == "bool", (
            f"{row['file']}:{row['line']} is what decides {row['name']}"
        )


def test_an_older_release_differs(release_0_5_8: Path) -> None:
    code, report, error = check(release_0_5_8)
    assert code == 3 and not report["ok"]
    assert "triton_backend.py:165: triton graph qo_indptr is int32, the contract says int64" in error
    assert "dflash_info.py: no such file" in error


def test_table_names_file_and_line(stock_tree: Path) -> None:
    command = [sys.executable, ROOT / "scripts/check_dtypes.py", "--sglang", stock_tree]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "srt/layers/attention/triton_backend.py:218" in run.stdout


def test_a_changed_width_in_the_real_source_is_found(stock_tree: Path) -> None:
    """One dtype argument of the release changed: the contract must notice."""
    path = "srt/layers/attention/flashinfer_mla_backend.py"
    text = (stock_tree / "sglang" / path).read_text()
    site = ("FlashInferMLAAttnBackend.init_cuda_graph_state", "self.cuda_graph_kv_indices")
    assert Source(text.encode()).dtype_of(*site).dtype == "int32"
    before = "cuda_graph_kv_indices = torch.zeros(\n                (max_bs * self.max_context_len,),\n"
    before += "                dtype=torch."
    assert before + "int32" in text
    changed = text.replace(before + "int32", before + "int64")
    assert Source(changed.encode()).dtype_of(*site).dtype == "int64"


CASES = {
    "x = torch.zeros(3, dtype=torch.int32)": "int32",
    "x = torch.zeros(3)": "float32",
    "x = torch.arange(0, n)": "int64",
    "x = torch.arange(0, n, dtype=torch.int32) * self.width": "int32",
    "x = torch.full((3,), True)": "bool",
    "x = torch.full((3,), 7)": "int64",
    "x = torch.ones(3, dtype=torch.long)": "int64",
    "x = torch.zeros(3).to(torch.bool)": "bool",
    "x = torch.tensor([1], dtype=torch.int64).to(device, non_blocking=True)": "int64",
    "x = torch.zeros(3, dtype=torch.uint8)[: n + 1]": "uint8",
    "y = torch.zeros(3, dtype=torch.int32)\nx = torch.zeros_like(y)": "int32",
    "x = torch.cumsum(torch.zeros(3, dtype=torch.int32), dim=0)": "int64",
    "x = torch.zeros(3, dtype=torch.int32)\nx[1:] = torch.cumsum(x, dim=0)": "int32",
    "x = []\nx.append(torch.arange(n) <= n)\nx = torch.cat(x, dim=0)": "bool",
    "x = torch.zeros(3)\nx = torch.zeros(3, dtype=torch.int32)": "int32",
    "with torch.device(d):\n    x = torch.empty(3, dtype=torch.int64)": "int64",
    "if n:\n    x = torch.empty(3, dtype=torch.int64)\nelse:\n    x = passed": "int64",
    "if n:\n    x = torch.empty(3, dtype=torch.int32)\n    return\nx = None": "int32",
    "x, y = torch.zeros(1, dtype=torch.int32), torch.zeros(1)": "int32",
    "kind = torch.int32\nx = torch.zeros(3, dtype=kind)": "int32",
    "x = torch.zeros(3, dtype=self.kind())": "int64",
    "x = self.buffer[:n]": "uint8",
    "x = self.made()": "int32",
    "x = torch.zeros(3, dtype=given)": "int32",
}
CLASS = """
class C:
    def __init__(self, buffer=None):
        self.buffer = torch.zeros(3, dtype=torch.uint8) if buffer is None else buffer

    def kind(self):
        return torch.int64

    def made(self):
        return torch.zeros(3, dtype=torch.int32)

    def f(self, n, device, passed, given):
{body}

    def caller(self):
        self.f(given=torch.int32)
"""


def source(body: str) -> Source:
    return Source(CLASS.format(body="".join(f"        {line}\n" for line in body.splitlines())).encode())


@pytest.mark.parametrize("body", CASES)
def test_ways_to_make_a_tensor(body: str) -> None:
    assert source(body).dtype_of("C.f", "x").dtype == CASES[body]


@pytest.mark.parametrize(
    "body",
    [
        "x = somebody.elses(n)",
        "x = passed",
        "x = torch.zeros(3).to(passed.dtype)",
        "x, y = somebody.elses(n)",
        "x = torch.zeros(3, dtype=unknown_name)",
        "if n:\n    x = torch.zeros(3)\nelse:\n    x = torch.zeros(3, dtype=torch.int32)",
        "y = 1",
    ],
)
def test_what_cannot_be_followed_is_said(body: str) -> None:
    with pytest.raises(NotEstablished):
        source(body).dtype_of("C.f", "x")


def test_a_branch_that_returns_is_seen() -> None:
    body = "if mode.is_target_verify():\n    x = torch.zeros(1, dtype=torch.int32)\n    return\nx = torch.zeros(1)"
    assert source(body).dtype_of("C.f", "x", "is_target_verify").dtype == "int32"


def test_branches_are_told_apart() -> None:
    body = "if mode.is_decode():\n    x = torch.zeros(1)\n"
    body += "elif mode.is_target_verify():\n    x = torch.zeros(1, dtype=torch.int32)"
    assert source(body).dtype_of("C.f", "x", "is_target_verify").dtype == "int32"
    assert source(body).dtype_of("C.f", "x", "is_decode").dtype == "float32"
    with pytest.raises(NotEstablished):
        source(body).dtype_of("C.f", "x", "is_idle")
    with pytest.raises(NotEstablished):
        source(body).dtype_of("C.g", "x")


def test_a_branch_is_told_by_whole_words() -> None:
    body = "if mode == Mode.PACKED:\n    x = torch.zeros(1, dtype=torch.uint8)\n"
    body += "elif mode == Mode.PACKED_BITS:\n    x = torch.zeros(1, dtype=torch.int64)"
    assert source(body).dtype_of("C.f", "x", "Mode.PACKED").dtype == "uint8"
    assert source(body).dtype_of("C.f", "x", "Mode.PACKED_BITS").dtype == "int64"
    with pytest.raises(NotEstablished):
        source(body).dtype_of("C.f", "x", "ode.PACKED")


def test_a_choice_in_an_expression_is_told_by_its_test() -> None:
    body = "self.kept = torch.zeros(1, dtype=torch.int32 if narrow else torch.int64)\nx = self.kept[: n + 1]"
    assert source(body).dtype_of("C.f", "x", unless="narrow").dtype == "int64"
    with pytest.raises(NotEstablished, match="more than one dtype"):
        source(body).dtype_of("C.f", "x")
    with pytest.raises(NotEstablished, match="depends on no choice by arrow"):
        source(body).dtype_of("C.f", "x", unless="arrow")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{ALPHA}<<<<<<< HEAD\nx = 1\n=======\nx = 2\n>>>>>>> other\n", len(ALPHA.splitlines()) + 1),
        (f"{ALPHA}def f(:\n", len(ALPHA.splitlines()) + 1),
        (f"{ALPHA}\0", None),
        (f"{ALPHA}x = {'(' * 300}", None),
    ],
    ids=["conflict markers", "syntax", "null byte", "nesting"],
)
def test_a_file_that_is_no_python_is_named_with_its_line(checkout: Checkout, text: str, line: int | None) -> None:
    (checkout.package / "srt/alpha.py").write_text(text)
    checkout.write_pin()
    alone = [sys.executable, checkout.root / "scripts/check_dtypes.py", "--sglang", checkout.package]
    for run in (
        checkout.run("check"),
        checkout.run("apply", "--no-build"),
        subprocess.run(alone, capture_output=True, text=True, check=False),
    ):
        assert run.returncode == 3 and "Traceback" not in run.stderr, run.stderr
        assert run.stderr.count("does not parse as Python") == 1
        assert f"srt/alpha.py:{line or ''}" in run.stderr
