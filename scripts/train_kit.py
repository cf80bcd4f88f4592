#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the evidence kit: python3 scripts/train_kit.py --out OUT --minutes 6."""

import sys

from kit.train import main

if __name__ == "__main__":
    sys.exit(main())
