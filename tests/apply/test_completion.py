# SPDX-License-Identifier: Apache-2.0
"""Shell completion: what bash asks argcomplete is answered, at once, and nothing needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import argcomplete  # noqa: F401 - one of the tests' requirements: nothing here is skipped
import pytest
from checkout import ROOT


def completed(line: str, tmp_path: Path, *flags: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code, and the words that complete the last one of `line`; `flags` are Python's own."""
    answer = tmp_path / "answer"
    answer.touch()
    words = line.split(" ")
    env = {
        **os.environ,
        "_ARGCOMPLETE": str(words.index("apply.py") + 1),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        **environment,
    }
    command = [sys.executable, *flags, ROOT / "apply.py"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert not run.stdout and not run.stderr
    return run.returncode, [word.strip() for word in answer.read_text().split("\n") if word]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("apply.py sta", ["status"]),
        ("python3 apply.py sta", ["status"]),
        ("python3 apply.py status --j", ["--json"]),
        ("python3 apply.py check --pin v0.5.12", ["v0.5.12.post1"]),
        ("python3 apply.py apply --arch 90a,12", ["90a,120", "90a,121"]),
        ("python3 apply.py list --sgl", []),
    ],
)
def test_words(line: str, words: list[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == (0, words)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "theme").touch()
    assert completed(f"apply.py status --sglang {tmp_path}/the", tmp_path) == (0, [f"{tmp_path}/there/"])


def test_without_argcomplete_nothing_happens(tmp_path: Path) -> None:
    assert completed("apply.py sta", tmp_path, "-S") == (1, [])  # no site-packages


def test_bash_finds_it_behind_python3(tmp_path: Path) -> None:
    """argcomplete's script for all Python programs, as a distribution sets it up, on `python3 apply.py re`."""
    script = """\
        eval "$(python -m argcomplete.scripts.activate_global_python_argcomplete --dest=-)"
        COMP_WORDS=(python3 apply.py rev) COMP_CWORD=2 COMP_LINE="python3 apply.py rev" COMP_POINT=20 COMP_TYPE=9
        _python_argcomplete_global python3
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert run.stdout.split() == ["revert"], run.stderr


def test_nothing_is_loaded_for_it_otherwise() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import applier.cli; print({'argcomplete'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "set()"
