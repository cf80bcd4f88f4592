# SPDX-License-Identifier: Apache-2.0
"""The ways to call libtreeverify from Python, each with the same checks of what a step may change.

* op: torch's dispatcher, a Python kernel behind; every argument checked and packed anew. All calls were this once, and
  those of captures and tests are.
* packed: attention/packed.py, ctypes on a struct that is packed once. The servers' way.
* tvm-ffi, torch C++: the same struct, the step's tensors checked in C++. Only against the empty library.
* launch: nothing but the call of the library, the current device and stream looked up.
* library: that call alone, by ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .host import compiled, host_us

BS, REAL, N, HEADS, CONTEXT = 8, 7, 16, 8, 4096

Row = dict[str, Any]


def bucket(attention: Any, device: torch.device) -> tuple[torch.Tensor, Any]:
    """req_to_token, and the metadata of a captured bucket."""
    target = attention.paths.Target(attention.abi.PATH_PORTABLE, attention.plan.PORTABLE_ROW_TILE, 132)
    geometry = attention.buffers.Geometry(device=device, heads=HEADS, row_width=CONTEXT, target=target)
    table = torch.zeros(BS + 1, CONTEXT, dtype=torch.int32, device=device)
    return table, attention.buffers.GraphBuffers(geometry, BS, N).metadata(BS)


def measure(attention: Any, device: torch.device, calls: int, folder: Path | None) -> Iterator[Row]:
    """Rows of every way.

    Args:
        attention: the overlay's package, attention, in either of its places.
        folder: of the empty library, where the two C++ ways are wanted: they are compiled there.
    """
    entry = "libtreeverify" if device.type == "cuda" else "empty"
    rest = torch.cuda.synchronize if device.type == "cuda" else _nothing
    for call, way, run in _ways(attention, device, folder):
        if isinstance(run, str):
            yield {"call": call, "way": way, "entry": entry, "skipped": run}
        else:
            yield {"call": call, "way": way, "entry": entry, **host_us(run, calls, rest)}


def _ways(
    attention: Any, device: torch.device, folder: Path | None
) -> Iterator[tuple[str, str, Callable[[], object] | str]]:
    ops, packed, abi = attention.ops, attention.packed, attention.abi
    table, to = bucket(attention, device)
    rows = torch.arange(BS, device=device)
    lens = torch.full((BS,), 1000, dtype=torch.int32, device=device)
    mask = torch.ones(BS * N, dtype=torch.int64, device=device)
    step = (rows, lens, mask, abi.MASK_PACKED, REAL)
    by_op, by_struct = packed.Prep(table, to), packed.PackedPrep(table, to)
    params = by_struct._params
    by_struct(*step)
    yield "prep", "op", lambda: by_op(*step)
    yield "prep", "packed", lambda: by_struct(*step)
    yield "prep", "launch", lambda: packed.launch("mla_prep", params, device)
    entry, reference = abi.entry("mla_prep"), ctypes.byref(params)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    yield "prep", "library", lambda: entry(reference, stream)
    if folder:
        address = ctypes.addressof(params)
        for way, build in (("tvm-ffi", _ffi), ("torch C++", _cpp)):
            try:
                function = build(folder)
            except (ImportError, OSError, subprocess.CalledProcessError) as e:
                yield "prep", way, str(getattr(e, "stderr", None) or e)
            else:
                yield "prep", way, functools.partial(function, address, *step)
    by_struct(rows, lens, None, abi.MASK_NONE, REAL)
    case = attention.cases.make_case([1000] * BS, N, HEADS, device=device)
    args = ops.VerifyArgs(
        case.q_nope, case.q_pe, case.pool, case.kv_indptr, case.kv_indices, case.qo_indptr, None, case.mask, None,
        case.mask_kind, BS, N, case.nsplit, 0.1, 0.0, case.out, case.workspace, taper=case.taper,
    )  # fmt: skip
    layer = packed.PackedVerify()
    yield "verify", "op", lambda: ops.mla_verify(*args)
    yield "verify", "packed", lambda: layer(*args)


def _ffi(folder: Path) -> Callable[..., object]:
    import tvm_ffi
    from tvm_ffi import libinfo

    home = Path(libinfo.find_libtvm_ffi()).parent
    includes = [f"-I{path}" for path in dict.fromkeys([*libinfo.include_paths(), libinfo.find_include_path()])]
    flags = ["-std=c++17", *includes, "-lempty", f"-L{home}", f"-Wl,-rpath,{home}", "-ltvm_ffi"]
    found: Callable[..., object] = tvm_ffi.load_module(str(compiled("ffi", "ffi.cpp", folder, flags))).mla_prep
    return found


def _cpp(folder: Path) -> Callable[..., object]:
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", f"-I{home / 'include'}", "-lempty", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    torch.ops.load_library(str(compiled("cpp", "torch_op.cpp", folder, flags)))
    found: Callable[..., object] = torch.ops.treeverify_bench_cpp.mla_prep.default
    return found


def _nothing() -> None:
    pass
