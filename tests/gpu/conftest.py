# SPDX-License-Identifier: Apache-2.0
"""Every test of the verify step runs once for each path of the kernels that the card has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    """cases.make_case for this path; `kv`, where given, is the pool's dtype: queries have it too, or bf16 if fp8."""
    return functools.partial(_make_case, path)


def _make_case(path: int, *args: Any, kv: torch.dtype = torch.bfloat16, **how: Any) -> cases.Case:
    if kv in paths.FP8:
        try:
            paths.target(torch.device("cuda"), path, kv)
        except RuntimeError:
            pytest.skip(f"that path has no kernels for {kv}")
    return cases.make_case(*args, path=path, **{**cases.pool_of(kv), **how})
