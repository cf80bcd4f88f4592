#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records verify steps of patched SGLangs on the CPU, for a GPU that has no SGLang, or none that runs.

    build/venv-tests/bin/python scripts/record_steps.py [--pin v0.5.23] [--out build/recorded]

Writes a file a pin; tests/gpu/test_recorded.py gives the kernels exactly those tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from applier.layout import CHECKOUT
from applier.pin import choose_pin, load_pins
from applier.say import note, result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pin", help="whose SGLang; all where left out")
    parser.add_argument("--out", type=Path, default=CHECKOUT.build / "recorded", help="folder to write to")
    options = parser.parse_args(arguments)
    try:
        import recorded
        from trees import patched_copy, released
        from worker import Worker
    except ImportError as error:
        note(f"error: {error}; scripts/run_tests.py makes build/venv-tests, whose Python has what this needs")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for pin in [choose_pin(CHECKOUT, options.pin)] if options.pin else load_pins(CHECKOUT):
        file = options.out.resolve() / f"{pin.name}.pt"
        with tempfile.TemporaryDirectory() as folder:
            worker = Worker(patched_copy(released(pin), Path(folder)))
            names = worker(recorded.record, file=str(file))
            worker.close()
        result(f"{file}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
