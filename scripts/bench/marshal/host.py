# SPDX-License-Identifier: Apache-2.0
"""Host time of a call, and a library whose launches do nothing."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parent
KERNELS = Path(__file__).resolve().parents[3] / "kernels"
OPS = ("mla_prep", "mla_plan", "mla_verify")
NAMESPACE = "treeverify_empty"


def host_us(call: Callable[[], object], calls: int, rest: Callable[[], object]) -> dict[str, float]:
    """Median and 99th percentile of `calls` calls, in microseconds, after as many that count for nothing.

    Args:
        rest: runs after every twentieth call, untimed: on a GPU a full queue of launches would be what is timed.
    """
    times = []
    for i in range(2 * calls):
        if i % 20 == 0:
            rest()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    kept = sorted(times[calls:])
    return {"median_us": round(statistics.median(kept), 2), "p99_us": round(kept[int(len(kept) * 0.99)], 2)}


def compiled(name: str, source: str, folder: Path, flags: Sequence[str] = ()) -> Path:
    """Path of a shared library made of one of SOURCES, which finds those made before in the same folder.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    library = folder / f"lib{name}.so"
    command = ["g++" if source.endswith("cpp") else "gcc", "-O2", "-shared", "-fPIC", "-w", f"-I{KERNELS}"]
    command += [f"-I{SOURCES}", str(SOURCES / source), "-o", str(library), f"-L{folder}", f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, *flags], check=True, capture_output=True, text=True)
    return library


def install_empty(attention: Any, folder: Path) -> Path:
    """Makes what launches on CUDA call empty functions, on tensors of the CPU. Returns the library of them.

    Args:
        attention: the overlay's package, attention, in either of its places.
    """
    path = compiled("empty", "empty.c", folder)
    library = ctypes.CDLL(str(path))
    attention.abi.library = lambda: library
    attention.abi.entry.cache_clear()

    def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
        if code := attention.abi.entry(what)(ctypes.byref(params), 0):
            raise RuntimeError(f"{what} of the empty library returned {code}")

    attention.ops.launch = attention.packed.launch = launch
    ops = torch.library.Library(NAMESPACE, "DEF")
    for name in OPS:
        ops.define(str(getattr(torch.ops.treeverify, name).default._schema).removeprefix("treeverify::"))
        ops.impl(name, getattr(attention.ops, f"_{name.removeprefix('mla_')}_cuda"), "CPU")
        setattr(attention.ops, name, getattr(getattr(torch.ops, NAMESPACE), name))
    _kept.append(ops)
    return path


_kept: list[torch.library.Library] = []
