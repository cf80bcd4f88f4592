# SPDX-License-Identifier: Apache-2.0
"""Launches that must not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait in here is an error; what was launched before is done."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
