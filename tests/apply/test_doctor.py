# SPDX-License-Identifier: Apache-2.0
"""What doctor finds, what it says to mend, and how it reads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from applier import driver
from checkout import Checkout

VERSIONS = {"python": "3.12.0", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.12.post1"}
VERSIONS |= {"flashinfer-python": "0.6.11", "sglang-kernel": "0.4"}


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def examined(checkout: Checkout, *arguments: object, **environment: str) -> dict[str, Any]:
    run = checkout.run("doctor", "--json", *arguments, **environment)
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == bool(report["mend"]) and not run.stderr, run.stderr
    return report


def mend(checkout: Checkout, *arguments: object, **environment: str) -> list[dict[str, str | None]]:
    found: list[dict[str, str | None]] = examined(checkout, *arguments, **environment)["mend"]
    return found


def gpus(folder: Path, *cards: str, driver: str = "580.65.06") -> dict[str, str]:
    """An environment whose nvidia-smi lists cards like "NVIDIA H200, 9.0"."""
    program(folder / "nvidia-smi", "\n".join(f"echo '{card}, 97887 MiB, {driver}'" for card in cards) or "exit 9")
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def python(folder: Path, **versions: str | None) -> Path:
    """A Python that has these."""
    return program(folder / "python", f"echo '{json.dumps({**VERSIONS, **versions})}'")


@pytest.mark.parametrize("prints", ["hello", "", "[1]", "7", "{}"])
def test_a_program_that_is_no_python(checkout: Checkout, tmp_path: Path, prints: str) -> None:
    exe = program(tmp_path / "echo", f"echo '{prints}'")
    problem = {"problem": f"{exe} is no Python", "remedy": "name the Python that serves with --python EXE"}
    assert {**problem, "command": None} in mend(checkout, "--python", exe)


def test_commands_name_the_tree(checkout: Checkout) -> None:
    for _ in range(2):
        commands = [item["command"] for item in mend(checkout)]
        assert f"python3 apply.py apply --sglang {checkout.package}" in commands
        checkout.run("apply", "--no-build")


@pytest.mark.parametrize(("version", "old"), [("12.6.85", True), ("12.8.61", False), ("13.0.88", False)])
def test_cuda_12_8_has_sm_120(checkout: Checkout, tmp_path: Path, version: str, old: bool) -> None:
    program(tmp_path / "cuda/bin/nvcc", f"echo 'Cuda compilation tools, release {version[:4]}, V{version}'")
    found = mend(checkout, CUDA_HOME=str(tmp_path / "cuda"))
    assert (f"nvcc {version} is too old for sm_120" in [item["problem"] for item in found]) is old


@pytest.mark.parametrize(("installed", "differs"), [("0.5.8", True), ("0.5.12.post1", False), (None, False)])
def test_a_python_with_another_release(
    checkout: Checkout, tmp_path: Path, installed: str | None, differs: bool
) -> None:
    (checkout.package / "_version.py").write_text("__version__ = version = '0.5.12.post1'\n")
    exe = python(tmp_path, sglang=installed)
    told = [item for item in mend(checkout, "--python", exe) if "the dependencies of that release" in str(item)]
    assert bool(told) is differs
    if told:
        assert f"{exe} has sglang 0.5.8" in str(told[0]["problem"])
        assert told[0]["command"] == f"{exe} -m pip install sglang==0.5.12.post1"


@pytest.mark.parametrize(
    ("cuda", "nvcc", "found", "least", "users"),
    [
        ("13.0", "12.9.1", "575.57.08", 580, "CUDA 13 (torch)"),
        ("12.8", "13.0.88", "575.57.08", 580, "CUDA 13 (nvcc)"),
        ("13.0", "13.0.88", "580.65.06", None, "CUDA 13 (torch, nvcc)"),
        ("12.8", "12.9.1", "535.54", None, "CUDA 12 (torch, nvcc)"),
        ("12.8", "12.9.1", "520.61.05", 525, "CUDA 12 (torch, nvcc)"),
    ],
)
def test_the_driver_that_cuda_needs(
    checkout: Checkout, tmp_path: Path, cuda: str, nvcc: str, found: str, least: int | None, users: str
) -> None:
    program(tmp_path / "cuda/bin/nvcc", f"echo V{nvcc}")
    machine = gpus(tmp_path / "smi", "NVIDIA H200, 9.0", driver=found)
    exe = python(tmp_path, cuda=cuda)
    report = examined(checkout, "--python", exe, CUDA_HOME=str(tmp_path / "cuda"), **machine)
    assert report["driver"] == found and report["driver_rule"]["for"] == users
    told = [item["problem"] for item in report["mend"] if item["problem"].startswith("driver")]
    assert told == ([f"driver {found} is too old: {users} needs {least} or newer"] if least else [])


def test_cuda_that_nobody_knows() -> None:
    assert driver.needed({}) is None and driver.needed({"torch": "99.1"}) is None
    assert driver.needed({"torch": "11.8", "nvcc": "99.1"}) == ("CUDA 11 (torch)", 450)
    assert driver.branch("580.65.06") == 580 and driver.branch("[N/A]") is None


@pytest.mark.parametrize(("says", "code"), [("Driver/library version mismatch", 18), ("", 9), ("", 0)])
def test_a_driver_that_does_not_work(checkout: Checkout, tmp_path: Path, says: str, code: int) -> None:
    """As after an update without a restart: what nvidia-smi says is told."""
    program(tmp_path / "nvidia-smi", f"echo {says}\nexit {code}")
    found = mend(checkout, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    told = f"fails ({says or f'exit code {code}'})" if code else "finds none"
    assert f"no GPU: nvidia-smi {told}" in [item["problem"] for item in found]


def test_a_torch_without_cuda(checkout: Checkout, tmp_path: Path) -> None:
    exe = python(tmp_path, cuda=None, torch="2.11.0+cpu")
    for cards in ((), ("NVIDIA H200, 9.0",)):
        problems = [item["problem"] for item in mend(checkout, "--python", exe, **gpus(tmp_path, *cards))]
        assert (f"torch 2.11.0+cpu in {exe} is built without CUDA" in problems) is bool(cards)


CARDS = ("NVIDIA H200, 9.0", "NVIDIA H200, 9.0", "NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0", "Tesla T4, 7.5")


@pytest.mark.parametrize(
    ("variables", "paths"),
    [
        ({}, ["hopper (wgmma)"] * 2 + ["portable (mma.sync)", "SGLang's own (older than sm_80)"]),
        ({"TREEVERIFY_PATH": "portable"}, ["portable (mma.sync)"] * 3 + ["SGLang's own (older than sm_80)"]),
        (
            {"TREEVERIFY_PATH": "hopper"},
            ["hopper (wgmma)"] * 2
            + ["none (TREEVERIFY_PATH=hopper, and this is no Hopper card)", "SGLang's own (older than sm_80)"],
        ),
        ({"TREEVERIFY_DISABLE": "1"}, ["SGLang's own (TREEVERIFY_DISABLE is set)"] * 4),
    ],
)
def test_the_kernels_each_card_takes(
    checkout: Checkout, tmp_path: Path, variables: dict[str, str], paths: list[str]
) -> None:
    report = examined(checkout, **gpus(tmp_path, *CARDS), **variables)
    assert [gpu["path"] for gpu in report["gpus"]] == paths
    told = [item for item in report["mend"] if "refuse to start" in item["problem"]]
    assert [item["command"] for item in told] == (["unset TREEVERIFY_PATH"] if "hopper" in variables.values() else [])


def test_it_reads_well(checkout: Checkout, tmp_path: Path) -> None:
    run = checkout.run("doctor", "--python", python(tmp_path, **{"sglang-kernel": None}), **gpus(tmp_path, *CARDS))
    text = run.stdout
    assert run.returncode == 1 and not run.stderr
    assert "  GPU        2 x NVIDIA H200, sm_90a, 97887 MiB\n             kernels: hopper (wgmma)\n" in text
    assert "sm_120, 97887 MiB\n             kernels: portable (mma.sync)\n" in text
    assert "  driver     580.65.06; CUDA 13 (" in text and "  torch      2.11.0, CUDA 13.0\n" in text
    assert "  sgl-kernel not installed\n" in text and f"  {checkout.package}\n  state      clean (v1)\n" in text
    assert f"\n     python3 apply.py apply --sglang {checkout.package}\n" in text + "\n"
    assert "\n  1. " in text and f"\n     {tmp_path}/python -m pip install sglang==1.0\n" in text
    commands = ("python3 apply.py", "-m pip install")
    long = [line for line in text.splitlines() if len(line) > 80 and not any(word in line for word in commands)]
    assert all(" " not in line.strip() or str(tmp_path) in line for line in long), long


def test_it_reads_the_real_python(checkout: Checkout) -> None:
    """torch's version file tells its CUDA without importing it; the example is this very Python, with torch or not."""
    report = examined(checkout, "--python", sys.executable)
    assert report["packages"]["python"] == platform.python_version()
    lacks = [item["problem"] for item in report["mend"] if item["problem"].startswith(f"{sys.executable} has no ")]
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        assert report["packages"]["torch"] is None and report["cuda"]["torch"] is None
        assert len(lacks) == 1 and "has no torch, " in lacks[0]
    else:
        told = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
        assert report["packages"]["torch"] == importlib.metadata.version("torch")
        assert report["cuda"]["torch"] == told["cuda"] and not any("torch" in problem for problem in lacks)


@pytest.mark.parametrize(("version", "fits"), [("3.9.7", False), ("3.10.0", True), ("3.14.1", False)])
def test_a_python_that_the_release_is_not_for(checkout: Checkout, tmp_path: Path, version: str, fits: bool) -> None:
    """With a tree and without; `serve` would refuse it."""
    toml = checkout.pin / "pin.toml"
    toml.write_text(toml.read_text().replace('">=3.10"', '">=3.10,<3.14"'))
    exe = python(tmp_path, python=version)
    problem = f"{exe} is Python {version}, sglang 1.0 is for >=3.10,<3.14"
    wanted = {"problem": problem, "remedy": "name another Python with --python EXE", "command": None}
    assert (wanted in mend(checkout, "--python", exe)) is not fits
    command = [sys.executable, checkout.root / "apply.py", "doctor", "--python", exe]
    run = subprocess.run(command, capture_output=True, text=True, env=checkout.env(), check=False)
    assert "\nthe tree\n  none\n" in run.stdout and (wanted["problem"] in " ".join(run.stdout.split())) is not fits


@pytest.mark.parametrize("state", ["no tree", "clean", "edited"])
def test_the_release_that_fits_the_tree_is_installed(checkout: Checkout, tmp_path: Path, state: str) -> None:
    """Not the newest: also where there is no tree yet, and where files of a patched one were edited."""
    if state == "edited":
        checkout.run("apply", "--no-build")
        (checkout.package / "srt/beta.py").write_text("mine\n")
    exe = python(tmp_path, torch=None)
    command = [*checkout.command("doctor")[:2], "doctor", "--json", "--python", str(exe)]
    tree = [] if state == "no tree" else ["--sglang", str(checkout.package)]
    run = subprocess.run([*command, *tree], capture_output=True, text=True, env=checkout.env(), check=False)
    assert f"{exe} -m pip install sglang==1.0" in [item["command"] for item in json.loads(run.stdout)["mend"]]
