# SPDX-License-Identifier: Apache-2.0
"""A kill, a torn write, a failing or a full disk at the boundaries of the system calls that write.

`faults.py` alone goes over every one of them; here every 12th, another one for each command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from checkout import Checkout

FOLDER = Path(__file__).resolve().parent
WRITING = "open64 write mkdir rename unlink unlinkat rmdir fsync chmod".split()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts and injects."""
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "these tests need g++ (Debian: apt-get install g++)"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, FOLDER / "faults.cpp", "-o", library], check=True)
    return library


def injected(checkout: Checkout, shim: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """faults.py on the tree."""
    environment = checkout.env({"LD_PRELOAD": str(shim), "PYTHONPATH": str(checkout.root / "scripts")})
    command = [sys.executable, str(FOLDER / "faults.py"), str(checkout.package), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_fault_at_a_boundary_leaves_the_tree_old_or_new(checkout: Checkout, shim: Path) -> None:
    run = injected(checkout, shim, "--every", "12")
    assert run.stdout, run.stderr
    sweeps = json.loads(run.stdout)
    assert [trouble for sweep in sweeps for trouble in sweep["troubles"]] == []
    assert run.returncode == 0 and len(sweeps) == 4
    outcomes = sum((Counter(sweep["outcomes"]) for sweep in sweeps), Counter())
    assert {outcome.split(":")[0] for outcome in outcomes} == {"killed", "torn", "input/output error", "disk full"}
    assert any("left torn, settled clean" in outcome for outcome in outcomes), "some fault left a tree to be healed"
    assert any("left torn, settled applied" in outcome for outcome in outcomes)


def test_a_tree_nobody_heals_is_called_broken(checkout: Checkout, shim: Path) -> None:
    """Control: with the healing taken out the same sweep complains."""
    journal = checkout.root / "scripts/applier/journal.py"
    text = journal.read_text()
    healing = "    for n in reversed(behind):\n"
    assert healing in text
    journal.write_text(text.replace(healing, "    for n in []:\n"))
    run = injected(checkout, shim, "--every", "12", "--sweeps", "1")
    troubles = [trouble for sweep in json.loads(run.stdout) for trouble in sweep["troubles"]]
    assert run.returncode == 1 and any("the tree is old or new" in trouble for trouble in troubles)


def test_the_shim_misses_no_call_that_writes(checkout: Checkout, shim: Path, tmp_path: Path) -> None:
    """strace and the shim count the same calls of one apply, below the tree."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("no strace here, or it may not trace")
    log = tmp_path / "strace"
    watched = "trace=open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,"
    watched += "fallocate,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,mknod,mknodat,link,linkat,"
    watched += "symlink,symlinkat,chmod,fchmod,fchmodat,chown,lchown,fchown,fchownat,utimensat,truncate,ftruncate,"
    watched += "fsync,fdatasync,setxattr,lsetxattr,fsetxattr,removexattr,ioctl,mmap"
    command = [strace, "-f", "-y", "-o", log, "-e", watched, *checkout.command("apply", "--no-build")]
    assert subprocess.run(command, capture_output=True, env=checkout.env(), check=False).returncode == 0
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        call, _, rest = line.split(maxsplit=1)[-1].partition("(")
        written = str(checkout.package) in rest and "= -1 " not in rest
        if call in ("open", "openat", "creat"):
            written = written and ("O_CREAT" in rest or "O_TRUNC" in rest)
        elif call in ("ioctl", "mmap"):
            written = written and "PROT_WRITE" in rest and "MAP_SHARED" in rest
        counts[call] += written
    checkout.run("revert")
    counted = injected(checkout, shim, "--every", "1000", "--sweeps", "1")
    calls = Counter(json.loads(counted.stdout)[0]["calls"])
    alike = {"open64": "openat", "rename": "rename", "unlinkat": "unlinkat"}
    for name in set(calls) | set(WRITING):
        assert calls[name] == counts[alike.get(name, name)], (calls, counts)
    assert sum(calls.values()) == sum(counts.values()), (calls, counts)


def test_a_disk_that_fills_up(checkout: Checkout, shim: Path, tmp_path: Path) -> None:
    """A real one: a tmpfs of one megabyte, seen by this command alone, with fewer and fewer blocks left."""
    mount = ["unshare", "--mount", "sh", "-c"]
    disk = tmp_path / "disk"
    disk.mkdir()
    trial = [*mount, f"mount -t tmpfs tmpfs {disk}"]
    if shutil.which("unshare") is None or subprocess.run(trial, check=False).returncode:
        pytest.skip("mounting takes root, unshare and mount")
    inside = Checkout(checkout.root, disk / "site/sglang")
    environment = checkout.env({"LD_PRELOAD": str(shim), "PYTHONPATH": str(checkout.root / "scripts")})
    script = f"mount -t tmpfs -o size=1m tmpfs {disk} && cp -a {checkout.package.parent} {disk}/ && exec \"$@\""
    command = [*mount, script, "sh", sys.executable, str(FOLDER / "faults.py"), str(inside.package)]
    command += ["--disk", "--sweeps", "2", "--every", "2"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = [sweep["outcomes"] for sweep in json.loads(run.stdout)]
    assert [set(found) for found in outcomes] == [
        {"disk full: left clean, settled clean", "disk full: left applied, settled applied"}
    ] * 2
