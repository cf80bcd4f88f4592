# SPDX-License-Identifier: Apache-2.0
"""Runs functions of test files inside a process that imports one SGLang tree, patched or stock.

Importing SGLang takes about ten seconds, and a process can hold one tree only: a session starts one worker a tree and
sends it calls, one JSON line each. ``Worker`` is the tests' side, ``python worker.py`` the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
MARK = "treeverify-worker:"


class Worker:
    """One process with `tree` (a folder that holds the package ``sglang``) first on its path."""

    def __init__(self, tree: Path, environment: dict[str, str] | None = None) -> None:
        path = os.pathsep.join([str(tree), str(SUPPORT)])
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "TRITON_INTERPRET": "1",
            "PYTHONWARNINGS": "ignore",
            **(environment or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "worker.py"), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Calls a module-level function of a test file in the worker.

        Returns:
            Its JSON-able result.

        Raises:
            AssertionError: it raised there; the message is its traceback.
        """
        call = {"file": function.__code__.co_filename, "name": function.__name__, "arguments": arguments}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer = json.loads(line.removeprefix(MARK))
                assert answer["error"] is None, answer["error"]
                return answer["value"]
        raise AssertionError(f"the SGLang worker ended with code {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(tree: Path) -> None:
    import cpu_sglang

    cpu_sglang.prepare()
    import sglang

    found = Path(sglang.__file__).resolve().parent
    if found != (tree / "sglang").resolve():
        raise SystemExit(f"sglang came from {found}, expected {tree / 'sglang'}")
    modules: dict[str, Any] = {}
    for line in sys.stdin:
        call = json.loads(line)
        answer: dict[str, Any] = {"value": None, "error": None}
        try:
            if call["file"] not in modules:
                modules[call["file"]] = _load(Path(call["file"]))
            answer["value"] = getattr(modules[call["file"]], call["name"])(**call["arguments"])
        except BaseException:
            answer["error"] = traceback.format_exc()
        print(MARK + json.dumps(answer), flush=True)


def _load(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
