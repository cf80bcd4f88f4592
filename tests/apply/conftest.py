# SPDX-License-Identifier: Apache-2.0
"""The small checkout as a fixture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import Checkout, make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A treeverify checkout of its own and a package to patch."""
    return make_checkout(tmp_path)
