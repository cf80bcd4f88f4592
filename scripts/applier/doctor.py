# SPDX-License-Identifier: Apache-2.0
"""What this machine has for treeverify, and what to mend and how."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from applier import driver
from applier.arch import OLDEST, Gpu, capability, found_gpus, runs_on, smi_failure
from applier.errors import UsageError
from applier.layout import Layout
from applier.pin import Pin, load_pins
from applier.requirements import allows
from applier.settling import REPORT, unsettled
from applier.state import EXIT_OK, State
from applier.toolchain import find_host_compiler, find_ninja, find_nvcc
from applier.tree import Tree

PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel")
CUDA_FOR_SM_120 = (12, 8)
PATH = "TREEVERIFY_PATH"
DISABLE = "TREEVERIFY_DISABLE"

_VERSIONS = """\
import importlib.metadata as m, importlib.util as u, json, pathlib, platform, re, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
def cuda():
    try: text = (pathlib.Path(u.find_spec("torch").origin).parent / "version.py").read_text()
    except (AttributeError, OSError, TypeError, ValueError): return None
    found = re.search(r"^cuda[^=\\n]*= *['\\"]([0-9.]+)", text, re.M)
    return found and found[1]
print(json.dumps({"python": platform.python_version(), "cuda": cuda(), **{n: version(n) for n in sys.argv[1:]}}))
"""


@dataclass(frozen=True)
class Mend:
    """Something wrong: what, how to put it right, and the command for that where there is one."""

    problem: str
    remedy: str | None = None
    command: str | None = None


def examine(layout: Layout, tree: Tree | None, state: State | None, where: str, python: str) -> dict[str, Any]:
    """GPUs, tools, packages of the Python that serves, the tree; `mend` lists what is wrong with its remedy.

    `where` is the --sglang that further commands on this tree need.
    """
    mend: list[Mend] = []
    gpus = found_gpus()
    nvcc = _nvcc(layout, mend)
    host, ninja = find_host_compiler(), find_ninja()
    pin = _pin(layout, state)
    first = len(mend)
    release = _release(tree, state, pin)
    wanted = release or (pin.pypi if pin and tree is None else None)
    versions = _versions(python, release, wanted, bool(gpus), mend)
    mend[first:first] = _wrong_python(python, versions.get("python"), pin)  # nothing can be installed into that one
    cudas = {"torch": versions.pop("cuda", None), "nvcc": nvcc["version"] if nvcc else None}
    if state and state.manifest and state.manifest.kernels:
        cudas["kernels"] = state.manifest.kernels.nvcc
    rule = driver.needed({name: version for name, version in cudas.items() if version})
    if not gpus:
        mend.append(_no_gpu(smi_failure()))
    _check_driver(gpus, rule, mend)
    _check_gpus(gpus, state, where, mend)
    if host is None:
        mend.append(Mend("no C++ compiler, which nvcc needs", None, "apt-get install g++"))
    if ninja is None:
        mend.append(Mend("no ninja", "apply fetches it by itself"))
    open_points = unsettled(layout.patches / state.pin) if state else []
    _check_tree(tree, state, where, open_points, mend)
    return {
        "gpus": [
            {**asdict(gpu), "arch": gpu.arch, "path": _path(gpu), "built": _built(gpu, state) is not None}
            for gpu in gpus
        ],
        "driver": gpus[0].driver if gpus else None,
        "driver_rule": {"for": rule[0], "at_least": rule[1]} if rule else None,
        "nvcc": nvcc,
        "host_compiler": str(host) if host else None,
        "ninja": str(ninja) if ninja else None,
        "serving_python": python,
        "requires_python": pin.requires_python if pin else None,
        "cuda": cudas,
        "packages": versions,
        "tree": _tree(tree, state, open_points),
        "mend": [asdict(item) for item in mend],
    }


def _tree(tree: Tree | None, state: State | None, open_points: list[str]) -> dict[str, Any] | None:
    if tree is None or state is None:
        return None
    kernels = [{"arch": arch, "state": kind} for arch, kind in state.kernels.items()]
    found = {"path": str(tree.package), "state": state.state, "pin": state.pin, "kernels": kernels}
    return {**found, "to_settle": open_points}


def _path(gpu: Gpu) -> str:
    """Which kernels a card takes: attention/paths.py asks the library the same, under the same variables."""
    if os.environ.get(DISABLE, "") not in ("", "0"):
        return f"SGLang's own ({DISABLE} is set)"
    if capability(gpu.arch) < OLDEST:
        return "SGLang's own (older than sm_80)"
    wanted = os.environ.get(PATH) or "auto"
    if wanted == "hopper" and gpu.arch != "90a":
        return f"none ({PATH}=hopper, and this is no Hopper card)"
    if wanted in ("auto", "hopper") and gpu.arch == "90a":
        return "hopper (wgmma)"
    return "portable (mma.sync)"


def _built(gpu: Gpu, state: State | None) -> str | None:
    """The architecture in the tree whose machine code runs on a card."""
    return next((arch for arch in (state.kernels if state else {}) if runs_on(arch, gpu)), None)


def _no_gpu(failure: str | None) -> Mend:
    if failure:
        remedy = "restart the machine where the driver was just updated; else install NVIDIA's driver again"
        return Mend(f"no GPU: nvidia-smi fails ({failure})", remedy)
    return Mend(
        "no GPU: nvidia-smi finds none",
        "here the tree can be patched and the kernels built with --arch, not run; on a machine that has one, "
        "install NVIDIA's driver",
    )


def _pin(layout: Layout, state: State | None) -> Pin | None:
    """The pin that serves: the tree's, the default one where there is no tree; None where this checkout has it not."""
    return next((pin for pin in load_pins(layout) if (pin.name == state.pin if state else pin.default)), None)


def _wrong_python(python: str, version: str | None, pin: Pin | None) -> list[Mend]:
    if not version or pin is None or allows(pin.requires_python, version):
        return []
    problem = f"{python} is Python {version}, sglang {pin.pypi} is for {pin.requires_python}"
    return [Mend(problem, "name another Python with --python EXE")]


def _check_driver(gpus: list[Gpu], rule: tuple[str, int] | None, mend: list[Mend]) -> None:
    found = driver.branch(gpus[0].driver) if gpus else None
    if rule and found is not None and found < rule[1]:
        mend.append(
            Mend(
                f"driver {gpus[0].driver} is too old: {rule[0]} needs {rule[1]} or newer",
                "install a newer driver (https://www.nvidia.com/drivers), or a torch and an nvcc of an older CUDA",
            )
        )


def _check_gpus(gpus: list[Gpu], state: State | None, where: str, mend: list[Mend]) -> None:
    told: set[str] = set()
    for gpu in gpus:
        if gpu.arch in told:
            continue
        told.add(gpu.arch)
        if capability(gpu.arch) < OLDEST:
            mend.append(
                Mend(
                    f"{gpu.name} (sm_{gpu.arch}) is older than sm_80: our kernels don't run there",
                    "SGLang's own are used; chains are served, trees are refused",
                )
            )
        elif state and state.kernels and _built(gpu, state) is None:
            mend.append(
                Mend(f"no kernels for {gpu.name} (sm_{gpu.arch}) in the tree", None, f"python3 apply.py apply{where}")
            )
        elif _path(gpu).startswith("none"):
            mend.append(Mend(f"{gpu.name}: {_path(gpu)}; the server will refuse to start", None, f"unset {PATH}"))


def _check_tree(tree: Tree | None, state: State | None, where: str, open_points: list[str], mend: list[Mend]) -> None:
    if tree is None or state is None:
        mend.append(Mend("no tree yet", "apply makes one from PyPI", "python3 apply.py apply"))
    elif open_points:
        problem = f"{state.pin}, the pin of {tree.package}, is unfinished and does not serve yet"
        remedy = f"{len(open_points)} to settle, see {REPORT} in its folder; status says the next step"
        mend.append(Mend(problem, remedy, f"python3 apply.py status{where}"))
    elif state.state == "clean":
        mend.append(Mend(f"{tree.package} is not patched", None, f"python3 apply.py apply{where}"))
    elif state.state != "applied":
        command = f"python3 apply.py status{where}"
        mend.append(Mend(f"{tree.package} is {state.state}", "status says why, and what to do", command))
    elif not state.kernels:
        mend.append(Mend(f"{tree.package} has no kernels", None, f"python3 apply.py apply{where}"))


def _nvcc(layout: Layout, mend: list[Mend]) -> dict[str, str] | None:
    try:
        nvcc = find_nvcc(layout)
        if nvcc is None:
            mend.append(Mend("no nvcc", "apply fetches PyPI's by itself; or set CUDA_HOME to a CUDA 13 toolkit"))
            return None
        version = nvcc.version()
    except UsageError as error:
        mend.append(Mend(error.message))
        return None
    if tuple(map(int, version.split(".")[:2])) < CUDA_FOR_SM_120:
        first = ".".join(map(str, CUDA_FOR_SM_120))
        mend.append(
            Mend(f"nvcc {version} is too old for sm_120", f"set CUDA_HOME to a toolkit of CUDA {first} or newer")
        )
    return {"path": str(nvcc.path), "origin": nvcc.origin, "version": version}


def _release(tree: Tree | None, state: State | None, pin: Pin | None) -> str | None:
    """The tree's version of SGLang: what its _version.py says, else its pin's where it is that."""
    if tree is None or state is None:
        return None
    built = re.search(rb"^__version__ = (?:version = )?['\"]([^'\"]+)", tree.read("_version.py") or b"", re.MULTILINE)
    if built:
        return built[1].decode("ascii", "replace")
    ours = state.state in EXIT_OK or (state.manifest is not None and not state.foreign)
    return pin.pypi if pin and ours else None


def _versions(
    python: str, release: str | None, wanted: str | None, gpu: bool, mend: list[Mend]
) -> dict[str, str | None]:
    """Versions of PACKAGES and torch's CUDA in that Python, {} where it is none.

    `release` is the tree's SGLang, `wanted` the one to install.
    """
    other = "install it, or name another Python with --python EXE"
    try:
        run = subprocess.run(
            [python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, timeout=60, check=True
        )
        told = json.loads(run.stdout)
        versions: dict[str, str | None] = {name: told[name] for name in ("python", *PACKAGES)}
        versions["cuda"] = told.get("cuda")
    except (OSError, subprocess.SubprocessError) as error:
        mend.append(Mend(f"{python} does not run ({error})", "name the Python that serves with --python EXE"))
        return {}
    except (ValueError, LookupError, TypeError, AttributeError):
        mend.append(Mend(f"{python} is no Python", "name the Python that serves with --python EXE"))
        return {}
    install = f"{shlex.quote(python)} -m pip install sglang{f'=={wanted}' if wanted else ''}"
    missing = [name for name in ("torch", "flashinfer-python", "sglang-kernel") if not versions[name]]
    if missing:
        mend.append(
            Mend(
                f"{python} has no {', '.join(missing)}, which the server needs",
                "SGLang brings what it needs, or name another Python with --python EXE",
                install,
            )
        )
    elif gpu and not versions["cuda"]:
        mend.append(Mend(f"torch {versions['torch']} in {python} is built without CUDA", other, install))
    if release and versions["sglang"] and versions["sglang"] != release:
        mend.append(
            Mend(
                f"{python} has sglang {versions['sglang']} and the dependencies of that release, the tree is {release}",
                other,
                install,
            )
        )
    return versions
