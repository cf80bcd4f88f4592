# SPDX-License-Identifier: Apache-2.0
"""What doctor says to mend."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkout import Checkout


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def mend(checkout: Checkout, *arguments: object, **environment: str) -> list[str]:
    run = checkout.run("doctor", "--json", *arguments, **environment)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    return [str(line) for line in json.loads(run.stdout)["mend"]]


@pytest.mark.parametrize("prints", ["hello", "", "[1]", "7", "{}"])
def test_a_program_that_is_no_python(checkout: Checkout, tmp_path: Path, prints: str) -> None:
    python = program(tmp_path / "echo", f"echo '{prints}'")
    assert f"{python} is no Python; name the Python that serves with --python" in mend(checkout, "--python", python)


def test_mend_lines_name_the_tree(checkout: Checkout) -> None:
    assert any(f"apply.py apply --sglang {checkout.package}" in line for line in mend(checkout))
    checkout.run("apply", "--no-build")
    assert any(f"apply.py apply --sglang {checkout.package}`" in line for line in mend(checkout))


@pytest.mark.parametrize(("version", "old"), [("12.6.85", True), ("12.8.61", False), ("13.0.88", False)])
def test_cuda_12_8_has_sm_120(checkout: Checkout, tmp_path: Path, version: str, old: bool) -> None:
    program(tmp_path / "cuda/bin/nvcc", f"echo 'Cuda compilation tools, release {version[:4]}, V{version}'")
    lines = mend(checkout, CUDA_HOME=str(tmp_path / "cuda"))
    assert any(f"nvcc {version} is too old for sm_120" in line for line in lines) is old


@pytest.mark.parametrize(("installed", "differs"), [("0.5.8", True), ("0.5.12.post1", False), (None, False)])
def test_a_python_with_another_release(
    checkout: Checkout, tmp_path: Path, installed: str | None, differs: bool
) -> None:
    (checkout.package / "_version.py").write_text("__version__ = version = '0.5.12.post1'\n")
    versions = {"python": "3.12.0", "torch": "2.11.0", "triton": "3.6.0", "sglang": installed}
    versions |= {"flashinfer-python": "0.6.11", "sglang-kernel": "0.4"}
    python = program(tmp_path / "python", f"echo '{json.dumps(versions)}'")
    lines = mend(checkout, "--python", python, PATH=os.environ["PATH"])
    told = [line for line in lines if "and the dependencies of that release" in line]
    assert bool(told) is differs
    if told:
        assert f"{python} has sglang 0.5.8" in told[0] and f"{python} -m pip install sglang==0.5.12.post1" in told[0]
