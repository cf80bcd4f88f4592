# SPDX-License-Identifier: Apache-2.0
"""One worker process for the patched tree and one for the stock tree; see tests/support/worker.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from worker import Worker


@pytest.fixture(scope="session")
def patched(patched_tree: Path) -> Iterator[Worker]:
    """Calls functions where the patched SGLang is imported."""
    worker = Worker(patched_tree)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def stock(stock_tree: Path) -> Iterator[Worker]:
    """Calls functions where SGLang as released is imported."""
    worker = Worker(stock_tree)
    yield worker
    worker.close()
