# SPDX-License-Identifier: Apache-2.0
"""Building kernels/ into one libtreeverify.so with ninja and nvcc, and reading what the compiler says of it.

Sources are mirrored into build/ and a mirrored file is rewritten only when its content changed, so that ninja, which
goes by time stamps, rebuilds by content: a fresh checkout or a touched file compiles nothing.

A unit that is of use on some architectures only says so near its top: `// tv-arches: 80 90 90a`. It gets machine code
for those alone, and where none of them is wanted it is compiled with -DTV_HOST_ONLY for the sake of its host symbols.

One that has `// tv-debug` there is compiled a second time, with -DTV_DEBUG, for the debug library: the other objects
are those of the usual one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from applier import ptxas
from applier.arch import gencode, sort_arches
from applier.blob import folder_digest, read
from applier.errors import BuildError, UsageError
from applier.layout import Layout
from applier.lock import locked
from applier.say import note, progress
from applier.toolchain import Nvcc, find_ninja, find_nvcc, provide_host_compiler, provide_nvcc

SUFFIXES = (".cu", ".cuh", ".h")
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-Xptxas", "-v", "-cudart", "static")
LIBRARY_NAME, DEBUG_NAME = "libtreeverify.so", "libtreeverify-debug.so"

_NINJA = """\
# Made by apply.py. $log keeps what ptxas says for runs that compile nothing.
nvcc = {nvcc}
flags = {flags}
rule compile
  command = {mark} $nvcc $flags $target -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)
  depfile = $out.d
  deps = gcc
  description = $in
rule link
  command = {mark} $nvcc $flags $target -shared $in -o $out
  description = $out
"""

_QUERY = """\
import ctypes, json, sys
info = ctypes.CDLL(sys.argv[1]).tv_kernel_info
rows, name, shared, threads = [], ctypes.c_char_p(), ctypes.c_int(), ctypes.c_int()
while info(len(rows), ctypes.byref(name), ctypes.byref(shared), ctypes.byref(threads)) == 0:
    rows.append([name.value.decode(), shared.value, threads.value])
print(json.dumps(rows))
"""


@dataclass(frozen=True)
class Built:
    """A library outside the tree, what it was made from, and one row per kernel and architecture."""

    library: Path
    sources: str
    arches: list[str]
    nvcc: str
    kernels: list[dict[str, Any]]


def sources_digest(layout: Layout) -> str:
    """Digest of kernel sources and compiler flags; tells whether a library in a tree is still up to date."""
    return folder_digest({**_sources(layout), "flags": " ".join(FLAGS).encode()})


def build(layout: Layout, arches: list[str], debug: bool = False) -> Built:
    """Compiles what changed. UsageError where a tool is missing, BuildError with the compiler's lines.

    Args:
        debug: make the library that checks its index arrays (kernels/check.h), in place of the usual one.
    """
    sources = _sources(layout)
    units = [name for name in sources if name.endswith(".cu")]
    if not units:
        raise UsageError(f"no kernel sources in {layout.kernels}")
    nvcc, version, ninja = _tools(layout, arches)
    home = layout.build / "kernels"
    folder = home / "_".join(arches)
    (folder / "obj").mkdir(parents=True, exist_ok=True)
    with locked(home, timeout=1800, waiting=note):
        _mirror(sources, home / "src")
        _write_if_changed(folder / "build.ninja", _ninja_file(home / "src", units, arches, nvcc, version))
        library = DEBUG_NAME if debug else LIBRARY_NAME
        _run(ninja, folder, library, home / "src", layout.kernels)
        rows = _report(folder, library, {unit: _object(unit, debug and _has_checks(sources[unit])) for unit in units})
    return Built(folder / library, sources_digest(layout), arches, version, rows)


def _tools(layout: Layout, arches: list[str]) -> tuple[Nvcc, str, Path]:
    """nvcc, its version, ninja; what is missing is fetched where that can be done."""
    try:
        provide_host_compiler()
        nvcc = find_nvcc(layout, arches) or provide_nvcc(layout, arches)
        version = nvcc.version()
        ninja = find_ninja()
    except UsageError as error:
        message = f"{error.message}; or apply with --no-build. The tree was not touched"
        raise BuildError(message, error.details) from None
    if ninja is None:
        raise BuildError("no ninja; `pip install ninja`. The tree was not touched")
    return nvcc, version, ninja


def _sources(layout: Layout) -> dict[str, bytes]:
    return {
        path.relative_to(layout.kernels).as_posix(): path.read_bytes()
        for path in sorted(layout.kernels.rglob("*"))
        if path.suffix in SUFFIXES
    }


def _mirror(sources: dict[str, bytes], folder: Path) -> None:
    for name, data in sources.items():
        _write_if_changed(folder / name, data)
    for path in list(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in sources:
            path.unlink()


def _write_if_changed(path: Path, data: bytes) -> None:
    if read(path) != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _ninja_file(src: Path, units: list[str], arches: list[str], nvcc: Nvcc, version: str) -> bytes:
    flags = [*FLAGS, f"-I{src}", *nvcc.flags]
    if host := os.environ.get("CXX"):
        flags += ["-ccbin", host]
    lines = [
        _NINJA.format(
            nvcc=_ninja_word(str(nvcc.path)),
            flags=" ".join(map(_ninja_word, flags)),
            mark=f"TREEVERIFY_NVCC={version}",
        )
    ]
    debug = []
    for unit in units:
        source = (src / unit).read_bytes()
        debug.append(_object(unit, _has_checks(source)))
        for out, more in {debug[-1]: ["-DTV_DEBUG"], _object(unit): []}.items():  # one, where it has no checks
            lines.append(f"build {out} | {out}.log: compile {_ninja_path(src / unit)}\n")
            lines.append(f"  target = {' '.join([*_targets(source.decode(), arches), *more])}\n")
    for library, objects in ((LIBRARY_NAME, list(map(_object, units))), (DEBUG_NAME, debug)):
        lines.append(f"build {library}: link {' '.join(objects)}\n")
        lines.append(f"  target = {' '.join(map(gencode, arches))}\n")
    return "".join(lines).encode()


def _targets(source: str, arches: list[str]) -> list[str]:
    """The architecture flags of one unit."""
    named = re.search(r"^// tv-arches: (.*)$", "\n".join(source.splitlines()[:10]), re.MULTILINE)
    served = [arch for arch in arches if named is None or arch in named[1].split()]
    return [*map(gencode, served)] if served else ["-DTV_HOST_ONLY", gencode(arches[0])]


def _has_checks(source: bytes) -> bool:
    """Whether a unit is another one in the debug library."""
    return b"\n// tv-debug\n" in source


def _object(unit: str, debug: bool = False) -> str:
    return "obj/" + re.sub(r"[^\w.-]", "_", unit.removesuffix(".cu")) + (".debug.o" if debug else ".o")


def _ninja_word(text: str) -> str:
    return shlex.quote(text).replace("$", "$$")


def _ninja_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _run(ninja: Path, folder: Path, library: str, mirror: Path, kernels: Path) -> None:
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "TERM": "dumb"}
    lines: list[str] = []
    with progress("kernels") as step:
        with subprocess.Popen(
            [ninja, "-C", folder, library], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n").replace(str(mirror), str(kernels)))
                if match := re.match(r"\[(\d+)/(\d+)\] (.*)", lines[-1]):
                    step(int(match[1]), int(match[2]), Path(match[3]).name)
    if process.returncode:
        raise BuildError("the kernels did not compile; the tree was not touched", _essence(lines))


def _essence(lines: list[str]) -> list[str]:
    """The compiler's own words: ninja's and ptxas's chatter left out."""
    noise = re.compile(
        r"ninja: |\[\d+/\d+\] |FAILED: |ptxas info|\s+\d+ bytes stack frame|TREEVERIFY_NVCC=|(\S+/)?nvcc -"
    )
    kept = list(dict.fromkeys(line for line in lines if line.strip() and not noise.match(line))) or lines
    return kept if len(kept) <= 60 else [*kept[:60], f"({len(kept) - 60} more lines)"]


def _report(folder: Path, library: str, objects: dict[str, str]) -> list[dict[str, Any]]:
    dynamic = {name: (shared, threads) for name, shared, threads in _kernel_info(folder / library)}
    rows: list[dict[str, Any]] = []
    for unit, made in objects.items():
        for usage in ptxas.parse((folder / f"{made}.log").read_text(encoding="utf-8", errors="replace")):
            shared, threads = dynamic.get(usage.kernel, (0, None))
            rows.append(
                {
                    "kernel": usage.kernel,
                    "arch": usage.arch,
                    "registers": usage.registers,
                    "spill_bytes": usage.spill,
                    "shared_bytes": usage.static_shared + shared,
                    "static_shared_bytes": usage.static_shared,
                    "threads": threads,
                    "source": unit,
                }
            )
    order = {arch: i for i, arch in enumerate(sort_arches([row["arch"] for row in rows]))}
    return sorted(rows, key=lambda row: (row["kernel"], order[row["arch"]]))


def _kernel_info(library: Path) -> list[tuple[str, int, int]]:
    """(name, dynamic shared memory in bytes, threads a block) of every kernel, asked of the library itself."""
    run = subprocess.run([sys.executable, "-c", _QUERY, library], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1]
        raise BuildError(f"{library.name} was built but does not load", [last])
    rows: list[tuple[str, int, int]] = [tuple(row) for row in json.loads(run.stdout)]
    return rows
