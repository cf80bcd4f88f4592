# SPDX-License-Identifier: Apache-2.0
"""Reads what the hook `watch` of scheduler_hooks.py writes about a scheduler that has come to rest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

QUIET_S, LIMIT_S = 0.7, 20


class Watch:
    """The lines of one scheduler.

    Args:
        path: of the file named by $TV_E2E_WATCH.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, 0

    def idle(self) -> dict[str, Any]:
        """The pools once the scheduler has been idle for QUIET_S seconds, after something it did since the last call.

        Raises:
            AssertionError: it didn't come to rest within LIMIT_S seconds, or is gone.
        """
        end, quiet, count = time.monotonic() + LIMIT_S, time.monotonic(), self._seen
        while time.monotonic() < end:
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            if len(lines) != count:
                quiet, count = time.monotonic(), len(lines)
            if count > self._seen and time.monotonic() - quiet > QUIET_S:
                self._seen = count
                return json.loads(lines[-1])
            time.sleep(0.05)
        raise AssertionError(f"the scheduler did not become idle within {LIMIT_S} s, or did nothing")
