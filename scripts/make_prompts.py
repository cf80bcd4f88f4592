#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints prompts of given token lengths, one JSON line each; see kit/prompts.py."""

import sys

from kit.prompts import main

if __name__ == "__main__":
    sys.exit(main())
