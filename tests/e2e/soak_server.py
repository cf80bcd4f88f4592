# SPDX-License-Identifier: Apache-2.0
"""A server started as users start it, `python -m sglang.launch_server`, whose scheduler tells about its pools.

The hooks of scheduler_hooks.py get into its scheduler as a plugin, which SGLang finds by its entry point.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from scheduler_hooks import NAMES, PLUGINS, STEPS, WATCH
from watch import Watch

HERE = Path(__file__).resolve().parent
HOOKS = ("watch", "finite", "steps")

COMPLAINTS = re.compile(r"Traceback|\bERROR\b|\bNaN\b|[Mm]emory leak|illegal memory access|CUDA error|Watchdog timeout")
"""What a server's log must not have. (`nan` alone is in names.)"""


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of sglang.Engine as those of sglang.launch_server; what is False is a default, and left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return words


def plugin(folder: Path) -> Path:
    """Writes the metadata by which SGLang finds the hooks; returns the folder that must be on the path."""
    metadata = folder / "treeverify_hooks-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: treeverify-hooks\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{PLUGINS}]\ntreeverify-hooks = scheduler_hooks:as_plugin\n")
    return folder


class Server:
    """A running server.

    Args:
        name: of its files in `work`: NAME.log, NAME.watch.jsonl, NAME.steps.rank0.jsonl.
        arguments: of sglang.Engine; `port` is the one it listens on.
        environment: variables besides those of this process.
    """

    def __init__(self, name: str, work: Path, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.name, self.model = name, str(arguments["model_path"])
        self.tokenizer = str(arguments.get("tokenizer_path", self.model))
        self.url = f"http://127.0.0.1:{arguments['port']}"
        self.log, self._steps = work / f"{name}.log", work / f"{name}.steps.rank0.jsonl"
        watch = work / f"{name}.watch.jsonl"
        for old in (watch, self._steps):
            old.unlink(missing_ok=True)
        self.watch, self._read = Watch(watch), 0
        path = [str(HERE), str(plugin(work / "plugin")), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", NAMES: " ".join(HOOKS),
            WATCH: str(watch), STEPS: str(work / f"{name}.steps"), **environment,
        }  # fmt: skip
        command = [sys.executable, "-m", "sglang.launch_server", *flags({"host": "127.0.0.1", **arguments})]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=told
            )

    def ready(self) -> bool:
        """Whether it answers.

        Raises:
            RuntimeError: it has ended; the message has the end of its log.
        """
        if not self.running():
            raise RuntimeError(f"{self.name} ended while it started:\n" + "\n".join(self.tail(25)))
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def running(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def flush(self) -> bool:
        """Empties the radix cache; False where it wouldn't."""
        try:
            with urllib.request.urlopen(f"{self.url}/flush_cache?timeout=20", data=b"", timeout=40) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def outputs(self) -> dict[str, list[int]]:
        """Token ids of the requests that have ended since the last call, by their names."""
        if not self._steps.exists():
            return {}
        with self._steps.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        return {row["rid"]: row["output"] for row in rows}

    def tail(self, lines: int) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def complaints(self) -> list[str]:
        """Lines of its log that tell of something wrong."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if COMPLAINTS.search(line)]

    def stop(self) -> None:
        """Ends it and all its processes at once; SGLang's own way out waits for seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
