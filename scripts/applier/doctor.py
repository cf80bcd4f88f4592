# SPDX-License-Identifier: Apache-2.0
"""What this machine has for treeverify, and what to mend and how."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from typing import Any

from applier.arch import OLDEST, Gpu, capability, found_gpus
from applier.errors import UsageError
from applier.layout import Layout
from applier.pin import load_pins
from applier.state import EXIT_OK, State
from applier.toolchain import find_host_compiler, find_ninja, find_nvcc
from applier.tree import Tree

PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel")
CUDA_FOR_SM_120 = (12, 8)
DRIVER_FOR_CUDA_13 = 580

_VERSIONS = """\
import importlib.metadata as m, json, platform, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"python": platform.python_version(), **{n: version(n) for n in sys.argv[1:]}}))
"""


def examine(layout: Layout, tree: Tree | None, state: State | None, python: str) -> dict[str, Any]:
    """GPUs, tools, packages of the Python that serves, the tree; `mend` lists what is wrong with its remedy."""
    where = f" --sglang {tree.package}" if tree and not tree.package.is_relative_to(layout.build) else ""
    mend: list[str] = []
    gpus = found_gpus()
    built = list(state.kernels) if state else []
    nvcc = _nvcc(layout, mend)
    host, ninja = find_host_compiler(), find_ninja()
    report: dict[str, Any] = {
        "gpus": [{**asdict(gpu), "arch": gpu.arch, "path": _path(gpu), "built": gpu.arch in built} for gpu in gpus],
        "driver": gpus[0].driver if gpus else None,
        "nvcc": nvcc,
        "host_compiler": str(host) if host else None,
        "ninja": str(ninja) if ninja else None,
        "packages": _versions(python, _release(layout, tree, state), mend),
        "tree": {"path": str(tree.package), "state": state.state, "pin": state.pin} if tree and state else None,
        "mend": mend,
    }
    if not gpus:
        mend.append(
            "no GPU: nvidia-smi finds none; here the tree can be patched and the kernels built with --arch, not run"
        )
    for gpu in gpus:
        if _path(gpu) == "stock":
            mend.append(
                f"{gpu.name} (sm_{gpu.arch}): older than sm_80, our kernels don't run there; SGLang's own are used"
            )
        elif built and gpu.arch not in built:
            mend.append(
                f"{gpu.name}: no kernels for sm_{gpu.arch} in the tree; run `python3 apply.py apply{where}` here"
            )
    if gpus and gpus[0].driver.split(".")[0].isdigit() and int(gpus[0].driver.split(".")[0]) < DRIVER_FOR_CUDA_13:
        mend.append(f"driver {gpus[0].driver} is older than CUDA 13 needs; install {DRIVER_FOR_CUDA_13} or newer")
    if host is None:
        mend.append("no C++ compiler; apt-get install g++")
    if ninja is None:
        mend.append("no ninja; apply fetches it by itself")
    if tree is None:
        mend.append("no tree yet; `python3 apply.py apply` makes one")
    elif state and state.state != "applied":
        mend.append(
            f"{tree.package} is {state.state}; `python3 apply.py status{where}` says why, "
            f"`python3 apply.py apply{where}` patches it"
        )
    elif state and not state.kernels:
        mend.append(f"{tree.package} has no kernels; run `python3 apply.py apply{where}` without --no-build")
    return report


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"gpu      {gpu['name']}, sm_{gpu['arch']}, {gpu['memory']}: {gpu['path']}" for gpu in report["gpus"]] or [
        "gpu      none"
    ]
    nvcc = report["nvcc"]
    lines += [
        f"driver   {report['driver'] or 'none'}",
        f"nvcc     {nvcc['version']} ({nvcc['origin']}: {nvcc['path']})" if nvcc else "nvcc     none",
        f"c++      {report['host_compiler'] or 'none'}",
        f"ninja    {report['ninja'] or 'none'}",
    ]
    lines += [f"{name:8} {version or 'not installed'}" for name, version in report["packages"].items()]
    tree = report["tree"]
    lines.append(f"tree     {tree['path']}: {tree['state']} ({tree['pin']})" if tree else "tree     none")
    lines += ["", *(f"mend: {line}" for line in report["mend"])] if report["mend"] else ["", "nothing to mend"]
    return "\n".join(lines)


def _path(gpu: Gpu) -> str:
    """Which kernels a card takes: attention/paths.py asks the library the same."""
    if capability(gpu.arch) < OLDEST:
        return "stock"
    return "hopper (wgmma)" if gpu.arch == "90a" else "portable (mma.sync)"


def _nvcc(layout: Layout, mend: list[str]) -> dict[str, str] | None:
    try:
        nvcc = find_nvcc(layout)
        if nvcc is None:
            mend.append("no nvcc; apply fetches PyPI's by itself, or set CUDA_HOME to a CUDA 13 toolkit")
            return None
        version = nvcc.version()
    except UsageError as error:
        mend.append(error.message)
        return None
    if tuple(map(int, version.split(".")[:2])) < CUDA_FOR_SM_120:
        first = ".".join(map(str, CUDA_FOR_SM_120))
        mend.append(f"nvcc {version} is too old for sm_120; set CUDA_HOME to a toolkit of CUDA {first} or newer")
    return {"path": str(nvcc.path), "origin": nvcc.origin, "version": version}


def _release(layout: Layout, tree: Tree | None, state: State | None) -> str | None:
    """The tree's version of SGLang: what its _version.py says, else its pin's where it is that."""
    if tree is None or state is None:
        return None
    built = re.search(rb"^__version__ = (?:version = )?['\"]([^'\"]+)", tree.read("_version.py") or b"", re.MULTILINE)
    if built:
        return built[1].decode("ascii", "replace")
    pins = {pin.name: pin.pypi for pin in load_pins(layout)}
    return pins.get(state.pin) if state.state in EXIT_OK else None


def _versions(python: str, release: str | None, mend: list[str]) -> dict[str, str | None]:
    """Versions of PACKAGES in that Python, empty where it isn't one; `release` is the tree's SGLang."""
    try:
        run = subprocess.run(
            [python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, timeout=60, check=True
        )
        versions: dict[str, str | None] = {name: json.loads(run.stdout)[name] for name in ("python", *PACKAGES)}
    except (OSError, subprocess.SubprocessError) as error:
        mend.append(f"{python} does not run ({error}); name the Python that serves with --python")
        return {}
    except (ValueError, LookupError, TypeError):
        mend.append(f"{python} is no Python; name the Python that serves with --python")
        return {}
    missing = [name for name in ("torch", "flashinfer-python", "sglang-kernel") if not versions[name]]
    if missing:
        mend.append(
            f"{python} has no {', '.join(missing)}; the server needs what the release needs: "
            f"{python} -m pip install sglang{f'=={release}' if release else ' of the release of the pin'}, "
            "or --python EXE of the environment that has it"
        )
    if release and versions["sglang"] and versions["sglang"] != release:
        mend.append(
            f"{python} has sglang {versions['sglang']} and the dependencies of that release, the tree is {release}; "
            f"{python} -m pip install sglang=={release}, or --python EXE of the environment that has it"
        )
    return versions
