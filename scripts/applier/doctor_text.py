# SPDX-License-Identifier: Apache-2.0
"""doctor's report, for people."""

from __future__ import annotations

from typing import Any

from applier import driver
from applier.show import COLOURS
from applier.text import field, paint, wrapped

NAMES = {"flashinfer-python": "flashinfer", "sglang-kernel": "sgl-kernel"}


def render(report: dict[str, Any]) -> str:
    """Machine, Python, tree, and what to mend."""
    lines = ["this machine", *_gpus(report["gpus"]), *field("driver", _driver(report), "  ")]
    nvcc = report["nvcc"]
    lines += field("nvcc", f"{nvcc['version']}, {nvcc['path']} ({nvcc['origin']})" if nvcc else _none(), "  ")
    lines += field("C++", report["host_compiler"] or _none(), "  ")
    lines += field("ninja", report["ninja"] or _none(), "  ")
    lines += ["", "the Python that serves", f"  {report['serving_python']}"]
    for name, version in report["packages"].items():
        cuda = f", CUDA {report['cuda']['torch'] or 'none'}" if name == "torch" and version else ""
        lines += field(NAMES.get(name, name), f"{version}{cuda}" if version else _none("not installed"), "  ")
    lines += ["", "the tree", *_tree(report["tree"]), "", *_mend(report["mend"])]
    return "\n".join(lines)


def _gpus(gpus: list[dict[str, Any]]) -> list[str]:
    """Cards that are alike in one entry."""
    alike: dict[tuple[Any, ...], int] = {}
    for gpu in gpus:
        key = tuple(gpu[name] for name in ("name", "arch", "memory", "path", "built"))
        alike[key] = alike.get(key, 0) + 1
    lines: list[str] = [] if gpus else field("GPU", _none(), "  ")
    for (name, arch, memory, path, built), number in alike.items():
        lines += field("GPU", f"{f'{number} x ' if number > 1 else ''}{name}, sm_{arch}, {memory}", "  ")
        kernels = f"kernels: {path}" + (", in the tree" if built else "")
        lines += field("", kernels, "  ")
    return lines


def _driver(report: dict[str, Any]) -> str:
    found, rule = report["driver"], report["driver_rule"]
    needs = f"{rule['for']} needs {rule['at_least']} or newer" if rule else "no CUDA here to need one"
    if found is None:
        return f"{_none()}; {needs}"
    number = driver.branch(found)
    good = not rule or number is None or number >= rule["at_least"]
    return f"{paint(found, 'good' if good else 'bad')}; {needs}"


def _tree(tree: dict[str, Any] | None) -> list[str]:
    if tree is None:
        return [f"  {_none()}"]
    kernels = ", ".join(f"sm_{one['arch']} {one['state']}" for one in tree["kernels"]) or _none()
    unfinished = f", {paint('unfinished', 'warn')}" if tree["to_settle"] else ""
    return [
        f"  {tree['path']}",
        *field("state", f"{paint(tree['state'], COLOURS[tree['state']])} ({tree['pin']}{unfinished})", "  "),
        *field("kernels", kernels, "  "),
    ]


def _mend(mend: list[dict[str, str | None]]) -> list[str]:
    """Commands stay on a line of their own, whole."""
    if not mend:
        return [paint("nothing to mend", "good")]
    lines = [paint("to mend", "bold")]
    for number, item in enumerate(mend, 1):
        text = "; ".join(filter(None, [item["problem"], item["remedy"]]))
        lead = f"  {number}. "
        lines += wrapped(text, lead, " " * len(lead))
        if item["command"]:
            lines.append(f"{' ' * len(lead)}{item['command']}")
    return lines


def _none(text: str = "none") -> str:
    return paint(text, "dim")
