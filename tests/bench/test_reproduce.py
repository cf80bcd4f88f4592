# SPDX-License-Identifier: Apache-2.0
"""scripts/reproduce.sh: what it says where there is no GPU, and that its stages resume."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("setup", "attention", "host", "acceptance", "speed", "long")

E2E = """#!/usr/bin/env bash
echo "$1 $2 ${TV_STAGES:-}${TV_BENCH_STAGES:-} $TV_ARCH" >> calls
[ "$1" != "${FAILS:-}" ] || exit 1
[ "$1" != "${UNFINISHED:-}" ] || exit 3
"""


def path_with(folder: Path, smi: str) -> str:
    """A PATH whose nvidia-smi is that script."""
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_without_a_gpu_it_says_what_it_skips(tmp_path: Path) -> None:
    path = path_with(tmp_path / "bin", "exit 9")
    run = subprocess.run(["bash", ROOT / "scripts" / "reproduce.sh"], cwd=tmp_path, env={**os.environ, "PATH": path},
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert run.returncode == 0 and "No NVIDIA GPU here" in run.stdout
    assert [line.split()[1] for line in run.stdout.splitlines() if "skipped:" in line] == list(STAGES)
    assert "results/h200/page.md" in run.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script beside an e2e.sh and a results_page.py that write down how they are called."""
    scripts = tmp_path / "scripts"
    (scripts / "gpu").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "reproduce.sh", scripts)
    (scripts / "gpu" / "e2e.sh").write_text(E2E)
    page = "import sys\nopen('calls', 'a').write(' '.join(['page', *sys.argv[1:]]))\n"
    (scripts / "results_page.py").write_text(page)
    (tmp_path / "build" / "gpu" / "site").mkdir(parents=True)
    return tmp_path


def reproduce(checkout: Path, *words: str, capability: str = "9.0", **more: str) -> tuple[int, list[str], str]:
    """Exit code, the calls it made, and what it said."""
    (checkout / "calls").write_text("")
    smi = f'[ "$1" = -L ] || echo {capability}'
    run = subprocess.run(["bash", checkout / "scripts" / "reproduce.sh", *words], capture_output=True, text=True,
                         env={**os.environ, "PATH": path_with(checkout / "bin", smi), **more}, timeout=60)  # fmt: skip
    return run.returncode, (checkout / "calls").read_text().splitlines(), run.stdout + run.stderr


def test_stages_run_once_and_resume(checkout: Path) -> None:
    out = checkout / "build" / "reproduce"
    code, calls, said = reproduce(checkout, UNFINISHED="long")
    assert code == 3 and "run it again" in said
    assert calls == [
        f"setup {out}  90a", f"bench {out} shapes 90a", f"marshal {out}  90a", f"ddtree {out} acceptance 90a",
        f"ddtree {out} speed 90a", f"long {out}  90a", f"page {out} --draw",
    ]  # fmt: skip
    code, calls, _ = reproduce(checkout)
    assert (code, calls) == (0, [f"long {out}  90a", f"page {out} --draw"])
    assert reproduce(checkout)[1] == [f"page {out} --draw"]


def test_a_stage_that_fails_stops_it(checkout: Path) -> None:
    code, calls, said = reproduce(checkout, "--out", "elsewhere", FAILS="marshal", capability="12.0")
    assert code == 1 and "host failed" in said
    assert [call.split()[0] for call in calls] == ["setup", "bench", "marshal"]
    assert calls[0].split() == ["setup", str(checkout / "elsewhere"), "120"]


@pytest.mark.parametrize("words", [["nothing"], ["--out"]])
def test_wrong_words_show_the_usage(checkout: Path, words: list[str]) -> None:
    code, calls, said = reproduce(checkout, *words)
    assert code == 2 and not calls and "acceptance | speed" in said
