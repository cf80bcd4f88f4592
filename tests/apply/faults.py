# SPDX-License-Identifier: Apache-2.0
"""Faults at the boundaries of system calls: LD_PRELOAD=faults.so PYTHONPATH=CHECKOUT/scripts python faults.py PACKAGE.

Each command of apply.py runs in a process of its own, forked from this one, and at its n-th call that changes a file
system it is killed, torn or let down by the disk. After every one: the tree is old or new once `status` has looked, the
state it says is that of the tree, and `apply` and `revert` bring it to what they are for. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from applier import cli
from checkout import tree_hash

COUNT, KILL, TEAR, FAIL, FULL = range(5)
FAULTS = {
    "killed": (KILL, 0),
    "torn": (TEAR, 0),
    "input/output error": (FAIL, errno.EIO),
    "disk full": (FULL, errno.ENOSPC),
}
ARGUMENTS = {"apply": ["apply", "--no-build"], "status": ["status"], "revert": ["revert"]}
SWEEPS = [("clean", "apply"), ("applied", "revert"), ("torn apply", "status"), ("torn revert", "status")]
GOALS = {"apply": "applied", "revert": "clean"}
NOTHING_LOST = "Nothing is lost"
SHIM = ctypes.CDLL(None)
SHIM.tv_log.restype = ctypes.c_char_p


@dataclass(frozen=True)
class Ended:
    """How a forked command ended: exit code, negative for a signal; what it said; calls that change a file system."""

    code: int
    out: str
    error: str
    calls: list[str]


def run(arguments: list[str], at: int = -1, fault: tuple[int, int] = (COUNT, 0)) -> Ended:
    """One command in a forked process, with a fault at its `at`-th call."""
    return forked(lambda: cli.main(arguments), at, fault)


def forked(work: Callable[[], Any], at: int = -1, fault: tuple[int, int] = (COUNT, 0)) -> Ended:
    """`work` in a forked process; what it returns is the exit code."""
    streams = [tempfile.TemporaryFile() for _ in range(3)]
    child = os.fork()
    if child == 0:
        code = 99
        for stream, number in zip(streams, (1, 2), strict=False):
            os.dup2(stream.fileno(), number)
        try:
            SHIM.tv_arm(ctypes.c_long(at), *fault)
            code = int(work() or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            calls = SHIM.tv_log()
            SHIM.tv_arm(ctypes.c_long(-1), COUNT, 0)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(streams[2].fileno(), calls)
            os._exit(code)
    _, status = os.waitpid(child, 0)
    said = []
    for stream in streams:
        stream.seek(0)
        said.append(stream.read().decode())
        stream.close()
    return Ended(os.waitstatus_to_exitcode(status), said[0], said[1], said[2].split())


class Bench:
    """One tree and copies of it: clean, applied, and torn by a kill in the middle of either command."""

    def __init__(self, package: Path, copies: Path) -> None:
        self.package, self.copies = package, copies
        self.at = ["--sglang", str(package)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for command in ARGUMENTS.values():  # here, so that no fork has to import and to compile
                cli.main([*command, *self.at])
        self.keep("clean")
        self.works("apply", "--no-build")
        self.keep("applied")
        self.states = {tree_hash(copies / name): name for name in ("clean", "applied")}
        for command, before in (("apply", "clean"), ("revert", "applied")):
            self.restore(before)
            calls = self.works(*ARGUMENTS[command]).calls
            self.restore(before)
            run([*ARGUMENTS[command], *self.at], len(calls) * 3 // 5, FAULTS["killed"])
            assert tree_hash(package) not in self.states, "killed in the middle"
            self.keep(f"torn {command}")

    def keep(self, name: str) -> None:
        shutil.copytree(self.package, self.copies / name, symlinks=True)

    def restore(self, name: str) -> None:
        shutil.rmtree(self.package)
        shutil.copytree(self.copies / name, self.package, symlinks=True)

    def works(self, *command: str) -> Ended:
        ended = run([*command, *self.at])
        assert ended.code == 0, ended.error
        return ended

    def sweep(self, start: str, command: str, every: int, first: int) -> dict[str, Any]:
        """The command on the tree `start`, with each fault at every `every`-th call from `first` on."""
        self.restore(start)
        calls = self.works(*ARGUMENTS[command]).calls
        outcomes: Counter[str] = Counter()
        troubles: list[str] = []
        for name in FAULTS:
            for n in range(first % every, len(calls), every):
                self.restore(start)
                ended = run([*ARGUMENTS[command], *self.at], n, FAULTS[name])
                outcome, wrong = self.judge(command, name, ended, follow=("apply", "revert")[n % 2])
                outcomes[outcome] += 1
                troubles += [f"{start}, {command}, {name} at call {n} ({calls[n]}): {line}" for line in wrong]
        return {"start": start, "command": command, "calls": Counter(calls), "outcomes": outcomes, "troubles": troubles}

    def crowd(self, start: str, command: str, every: int) -> dict[str, Any]:
        """The command with less and less taken from the disk, until it works: `package` lies on one of its own."""
        filler = self.package.parent / "filler"
        outcomes: Counter[str] = Counter()
        troubles: list[str] = []
        for blocks in range(0, 10_000, every):
            self.restore(start)
            block = os.statvfs(self.package).f_bsize
            with open(filler, "wb", buffering=0) as file:
                with contextlib.suppress(OSError):  # until nothing goes in any more
                    while file.write(b"x" * block):
                        pass
                os.fsync(file.fileno())
                file.truncate(max(0, file.tell() - blocks * block))
            ended = run([*ARGUMENTS[command], *self.at])
            outcome, wrong = self.judge(command, "disk full", ended, ("apply", "revert")[blocks % 2], filler.unlink)
            outcomes[outcome] += 1
            troubles += [f"{start}, {command}, {blocks} blocks left: {line}" for line in wrong]
            if ended.code == 0:
                break
        return {"start": start, "command": command, "calls": {}, "outcomes": outcomes, "troubles": troubles}

    def judge(
        self, command: str, fault: str, ended: Ended, follow: str, mend: Callable[[], object] = lambda: None
    ) -> tuple[str, list[str]]:
        """What became of the tree, and which promises were broken; `mend` gives the disk its room again."""
        left = self.states.get(tree_hash(self.package), "torn")
        told = run(["status", "--json", *self.at])
        settled = self.states.get(tree_hash(self.package), "torn")
        mend()
        last = run([*ARGUMENTS[follow], *self.at])
        final = self.states.get(tree_hash(self.package), "torn")
        killed = FAULTS[fault][0] in (KILL, TEAR)
        promises = {
            "the fault struck": ended.code == -signal.SIGKILL if killed else ended.code >= 0,
            "a failing disk is told": killed or ended.code == 0 or (ended.code == 2 and "error: " in ended.error),
            "what a failing disk stopped is taken back at once": killed
            or left != "torn"
            or NOTHING_LOST in ended.error
            or ended.code == 0  # remains of the journal, which the next command sweeps
            or command == "status",
            "what is said to be done is done": ended.code != 0 or settled == GOALS.get(command, settled),
            "what is said to be taken back is": "taken back" not in ended.error or settled != GOALS.get(command),
            "no traceback": "Traceback" not in ended.error + told.error + last.error,
            "the tree is old or new": settled != "torn",
            "status tells which": told.code == 0 and json.loads(told.out)["state"] == settled,
            "the next command does its work": last.code == 0 and final == GOALS[follow],
        }
        broken = [promise for promise, kept in promises.items() if not kept]
        said = [line for line in (ended.error, told.error, last.error) if broken and line]
        return f"{fault}: left {left}, settled {settled}", [" / ".join([*broken, *said])] if broken else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th call only, another one each time")
    parser.add_argument("--sweeps", type=int, default=len(SWEEPS), metavar="K", help="the first K of the sweeps only")
    parser.add_argument("--disk", action="store_true", help="fill the disk that PACKAGE is on instead: a small one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as copies:
        bench = Bench(options.package, Path(copies))
        sweeps = [
            bench.crowd(start, command, options.every)
            if options.disk
            else bench.sweep(start, command, options.every, first)
            for first, (start, command) in enumerate(SWEEPS[: options.sweeps])
        ]
    print(json.dumps(sweeps, indent=1))
    return 1 if any(sweep["troubles"] for sweep in sweeps) else 0


if __name__ == "__main__":
    sys.exit(main())
