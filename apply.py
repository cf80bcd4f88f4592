#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""Patches a pinned SGLang release with treeverify. `python3 apply.py --help` lists the commands."""

import gc
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("apply.py needs Python 3.10 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))

from applier.cli import main

if __name__ == "__main__":
    gc.disable()  # a run of a second: looking for cycles among the nodes of parsed sources doubles it
    sys.exit(main(sys.argv[1:]))
