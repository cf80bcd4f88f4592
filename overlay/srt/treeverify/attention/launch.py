# SPDX-License-Identifier: Apache-2.0
"""Calling an entry point of libtreeverify on torch's current stream."""

from __future__ import annotations

import ctypes

import torch

from . import abi


def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
    """Calls tv_<what>, which only launches, with `device` current. `params` may change as soon as it has returned.

    Raises:
        RuntimeError: the library is missing, or CUDA refuses.
    """
    entry, index = abi.entry(what), device.index
    if index == torch.cuda.current_device():
        code = entry(ctypes.byref(params), _stream(index))
    else:
        with torch.cuda.device(index):
            code = entry(ctypes.byref(params), _stream(index))
    if code:
        abi.check(code, what)


def _stream(index: int) -> int:
    """The current stream's handle. As Triton and Inductor get it: a torch.cuda.Stream costs more than the launch."""
    return int(torch._C._cuda_getCurrentRawStream(index))
