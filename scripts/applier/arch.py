# SPDX-License-Identifier: Apache-2.0
"""GPU architectures: what to build for, as nvcc writes them without the prefix ("90a", "120")."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from applier.errors import UsageError
from applier.say import note

OLDEST = 8.0  # compute capability the kernels need
OWN_FEATURES = {"9.0": "90a"}  # capabilities whose kernels use instructions of that chip alone

KB = 1024
# Shared memory a block may opt in to, static and dynamic together, in bytes.
SHARED_LIMIT = {8.0: 163 * KB, 8.6: 99 * KB, 8.7: 163 * KB, 8.9: 99 * KB, 9.0: 227 * KB, 10.0: 227 * KB, 10.3: 227 * KB}
SHARED_LIMIT_ELSEWHERE = 99 * KB  # sm_120 and whatever we don't know


@dataclass(frozen=True)
class Gpu:
    """One card as nvidia-smi describes it; `capability` like "12.0"."""

    name: str
    capability: str
    memory: str
    driver: str

    @property
    def arch(self) -> str:
        return OWN_FEATURES.get(self.capability, self.capability.replace(".", ""))


def found_gpus() -> list[Gpu]:
    """The machine's cards, empty without nvidia-smi or without a working driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if run.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in run.stdout.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 4 and re.fullmatch(r"\d+\.\d+", row[1])]


def smi_failure() -> str | None:
    """What nvidia-smi says where it does not work, on one line; None where it does, or there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return " ".join((run.stdout + run.stderr).split()) or f"exit code {run.returncode}" if run.returncode else None


def parse_arches(text: str) -> list[str]:
    """ "90a,120" as a sorted list without repeats; UsageError names the part that is no architecture."""
    parts = [part.strip().removeprefix("sm_") for part in text.split(",") if part.strip()]
    for part in parts:
        if not re.fullmatch(r"\d{2,3}[af]?", part):
            raise UsageError(f"--arch {part!r}: not an architecture; write them like 90a,120")
        if capability(part) < OLDEST:
            raise UsageError(f"--arch {part}: the kernels need sm_80 or newer")
    if not parts:
        raise UsageError("--arch names no architecture; write them like 90a,120")
    return sort_arches(parts)


def choose_arches(asked: str | None, recorded: list[str] | None = None) -> list[str]:
    """What to build for: --arch, else the cards found, else what the tree was built for before."""
    if asked:
        return parse_arches(asked)
    gpus = found_gpus()
    found = sort_arches([gpu.arch for gpu in gpus if float(gpu.capability) >= OLDEST])
    old = ", ".join(sorted({f"{gpu.name} (sm_{gpu.arch})" for gpu in gpus if float(gpu.capability) < OLDEST}))
    if found:
        if old:
            note(f"note: {old} is older than sm_80 and gets no kernels")
        return found
    if recorded:
        return recorded
    if old:
        raise UsageError(f"{old}: the kernels need sm_80 or newer; --arch builds for another machine")
    raise UsageError(
        "no GPU found, so there is nothing to tell what to build the kernels for; "
        "give --arch (90a for H100/H200, 120 for RTX PRO 6000, several as 90a,120), or --no-build"
    )


def sort_arches(arches: list[str]) -> list[str]:
    return sorted(set(arches), key=lambda arch: (int(arch.rstrip("af")), arch))


def capability(arch: str) -> float:
    """ "90a" as 9.0."""
    return int(arch.rstrip("af")) / 10


def runs_on(arch: str, gpu: Gpu) -> bool:
    """Whether machine code for `arch` runs on a card: the same major, no newer minor; with a letter, that chip only."""
    if arch[-1] in "af":
        return arch == gpu.arch
    major, minor = divmod(int(arch), 10)
    gpu_major, gpu_minor = map(int, gpu.capability.split("."))
    return major == gpu_major and minor <= gpu_minor


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a block can have there."""
    return SHARED_LIMIT.get(capability(arch), SHARED_LIMIT_ELSEWHERE)


def gencode(arch: str) -> str:
    """nvcc's flag for machine code of one architecture."""
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"
