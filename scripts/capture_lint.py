#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds calls that a CUDA graph can't hold, or that wait for the GPU, reachable from the verify path of an SGLang tree.

    python3 scripts/capture_lint.py --sglang DIR [--pin v0.5.12.post1] [--json] [--allowed]

Reads the source only. Starts at the entries of the pin's capture.toml and follows calls through the overlay, the
patched files and those that file names, by their names, annotations and assignments; tests that capture.toml decides
leave the other branch out. What may stay stands in capture-allow.txt with its reason; an entry there that matches
nothing is an error. A tree without the overlay is linted from SGLang's own entries, with nothing allowed.

It can't see: calls through values it has no class for (a model's forward, callbacks, getattr with a computed name or of
a tensor, `f = t.item` and operator.methodcaller, builtins under other names as in map(int, t)); functions picked from
several, by a test, a list or a dict, and those that a default, a lambda or partial of a module or an attribute holds;
what Python calls unasked (operators, len, indexing, iteration, truth, setters and __getattr__ of a class), what a
decorator puts around a function, and exec; overrides in classes below the one an annotation names, unless capture.toml
does; classes inside functions; what other packages do inside (FlashInfer, sgl_kernel, Triton kernels), attributes set
from outside their class, what ** and nonlocal carry, what single keys of a dict hold, and tensors on the GPU whose name
ends in _cpu. Both branches of an undecided test count as
run, and branches that end in `raise` are left out: refusals may cost what they like. Whether a step really never waits
is measured on the GPU (scripts/gpu/e2e.sh).

Exit 0: nothing left; 1: findings, or entries that match nothing; 2: wrong usage, or an entry point is gone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("capture_lint.py needs Python 3.10 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from applier import bootstrap


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sglang", type=Path, required=True, metavar="DIR", help="repository, python/ or package")
    parser.add_argument("--pin", metavar="P", help="whose entries; the tree's own pin where left out")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--allowed", action="store_true", help="show the allowed findings too")
    options = parser.parse_args(arguments)

    from applier.errors import ApplierError
    from applier.layout import CHECKOUT
    from applier.nearest import pin_of
    from applier.patchset import load_patches
    from applier.pin import choose_pin
    from applier.say import note, result, result_json
    from applier.tree import locate
    from capture.config import load_config
    from capture.lint import lint
    from capture.report import as_json, render

    try:
        tree = locate(options.sglang)
        pin = choose_pin(CHECKOUT, options.pin) if options.pin else pin_of(tree, CHECKOUT)
        report = lint(tree.package, load_config(pin.folder), load_patches(pin).touched)
    except ApplierError as error:
        note("\n  ".join([f"error: {error.message}", *error.details]))
        return error.exit_code
    if options.json:
        result_json({"pin": pin.name, "tree": str(tree.package), **as_json(report)})
    else:
        result(render(report, options.allowed))
    return 0 if report.ok else 1


if __name__ == "__main__":
    bootstrap.require(["unidiff", *(["tomli"] if sys.version_info < (3, 11) else [])])
    sys.exit(main(sys.argv[1:]))
