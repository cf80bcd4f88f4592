# SPDX-License-Identifier: Apache-2.0
"""What --help shows of each command: the ways it is typed."""

from __future__ import annotations

EXIT_CODES = """exit codes:
  0  done, or nothing to do
  1  drift or conflict, nothing changed (port: things are left to settle)
  2  wrong usage, or a tree or tool is missing
  3  SGLang's dtypes are not those of the contract
  4  the kernels did not build"""

EXAMPLES = {
    "apply": (
        ("a tree from PyPI, kernels for the GPUs found", "apply"),
        ("your own SGLang: a checkout, its python/ or site-packages", "apply --sglang ~/sglang"),
        ("on a machine without a GPU, for another one", "apply --sglang ~/sglang --arch 90a,120"),
        ("a tree that moved on a little", "apply --sglang ~/sglang --3way"),
    ),
    "check": (
        ("would apply work? nothing is written", "check --sglang ~/sglang"),
        ("for a script", "check --sglang ~/sglang --json"),
    ),
    "status": (
        ("what a tree is, why, and the way on", "status --sglang ~/sglang"),
        ("for a script; exit 0 where it is clean or applied", "status --sglang ~/sglang --json"),
    ),
    "revert": (
        ("the release again, byte for byte", "revert --sglang ~/sglang"),
        ("also where you edited it; your copies go to build/", "revert --sglang ~/sglang --force"),
    ),
    "refresh": (("edits of a patched tree, back into patches and overlay", "refresh --sglang ~/sglang"),),
    "port": (("start a new pin from an older one", "port --from v0.5.12.post1 --to ~/sglang"),),
    "list": (("which releases, which patches, until when", "list"), ("for a script", "list --json")),
    "build": (
        ("for the GPUs found", "build"),
        ("for H200 and RTX PRO 6000, with a report for scripts", "build --arch 90a,120 --json"),
    ),
    "doctor": (
        ("what this machine and your Python have and lack", "doctor"),
        ("the Python and the tree that serve", "doctor --sglang ~/sglang --python ~/venv/bin/python"),
        ("for a script; exit 0 where nothing is to mend", "doctor --json"),
    ),
    "selftest": (
        ("every kernel on this machine's GPU against float64", "selftest --sglang ~/sglang"),
        ("for a report, without timings", "selftest --sglang ~/sglang --json --no-bench"),
    ),
    "serve": (
        (
            "everything after -- goes to sglang.launch_server",
            "serve --sglang ~/sglang -- --model-path MODEL --tp 8",
        ),
        ("the Python that has SGLang's dependencies", "serve --python ~/venv/bin/python -- --model-path MODEL"),
    ),
}
"""By command: what it is for, and its arguments."""


def epilog(command: str) -> str:
    """The end of a command's help."""
    lines = ["examples:"] if command in EXAMPLES else []
    for text, arguments in EXAMPLES.get(command, ()):
        lines += [f"  # {text}", f"  python3 apply.py {arguments}"]
    return "\n".join([*lines, "", EXIT_CODES])
