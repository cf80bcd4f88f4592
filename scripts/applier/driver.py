# SPDX-License-Identifier: Apache-2.0
"""Which driver a CUDA version needs."""

from __future__ import annotations

FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version, the driver branch that runs all of its minor versions (NVIDIA, CUDA Compatibility)."""


def needed(cudas: dict[str, str]) -> tuple[str, int] | None:
    """The strictest of several users of CUDA, {"torch": "13.0", …}: "CUDA 13 (torch, nvcc)" and its first driver.

    None where no version is known.
    """
    majors = {name: int(version.split(".")[0]) for name, version in cudas.items() if version[:1].isdigit()}
    known = [major for major in majors.values() if major in FIRST_DRIVER]
    if not known:
        return None
    newest = max(known)
    users = ", ".join(name for name, major in majors.items() if major == newest)
    return f"CUDA {newest} ({users})", FIRST_DRIVER[newest]


def branch(driver: str) -> int | None:
    """580 of "580.65.06"."""
    first = driver.split(".")[0]
    return int(first) if first.isdigit() else None
