#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the tensor dtypes in SGLang's source with a pin's contract. Reads the source only, never imports it.

    python3 scripts/check_dtypes.py --sglang DIR [--pin v0.5.12.post1] [--json]

Exit 0: as the contract says; 2: wrong usage; 3: a dtype differs or its place is gone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("check_dtypes.py needs Python 3.10 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from applier import bootstrap


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--sglang", type=Path, required=True, help="repository root, its python/, site-packages or package"
    )
    parser.add_argument("--pin", help="whose contract; the tree's own pin where left out")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)

    from applier.contract import check_contract, problems_of
    from applier.errors import ApplierError
    from applier.layout import CHECKOUT
    from applier.nearest import pin_of
    from applier.pin import choose_pin
    from applier.say import note, result, result_json
    from applier.tables import contract_table
    from applier.tree import locate

    try:
        tree = locate(options.sglang)
        pin = choose_pin(CHECKOUT, options.pin) if options.pin else pin_of(tree, CHECKOUT)
        rows = check_contract(pin, tree.read)
    except ApplierError as error:
        note(f"error: {error.message}")
        return error.exit_code
    problems = problems_of(rows)
    if options.json:
        result_json({"pin": pin.name, "ok": not problems, "rows": [row.as_json() for row in rows]})
    else:
        result(contract_table(rows))
    for problem in problems:
        note(f"differs: {problem}")
    return 3 if problems else 0


if __name__ == "__main__":
    bootstrap.require(["unidiff", *(["tomli"] if sys.version_info < (3, 11) else [])])
    sys.exit(main(sys.argv[1:]))
