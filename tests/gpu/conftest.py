# SPDX-License-Identifier: Apache-2.0
"""Every test of the verify step runs once for each path of the kernels that the card has."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from treeverify.attention import cases, paths


@pytest.fixture(params=["portable", "narrow", "hopper"])
def path(request: pytest.FixtureRequest) -> int:
    """abi.PATH_*; a Hopper card must have all of them, what other cards have not is skipped."""
    if request.param != "portable" and torch.cuda.get_device_capability() != (9, 0):
        why = "is no Hopper card" if request.param == "hopper" else "runs the narrow kernels as its portable path"
        pytest.skip(f"{torch.cuda.get_device_name()} {why}")
    wanted = paths.NAMES[request.param]
    assert paths.target(torch.device("cuda"), wanted).path == wanted
    return wanted


@pytest.fixture
def make_case(path: int) -> Callable[..., cases.Case]:
    """cases.make_case for this path."""
    return functools.partial(cases.make_case, path=path)
