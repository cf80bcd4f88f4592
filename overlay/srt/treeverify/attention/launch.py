# SPDX-License-Identifier: Apache-2.0
"""Calling an entry point of libtreeverify on torch's current stream."""

from __future__ import annotations

import ctypes

import torch

from . import abi


def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
    """Calls tv_<what>, which only launches, with `device` current.

    Raises:
        RuntimeError: the library is missing, or CUDA refuses.
    """
    entry = getattr(abi.library(), f"tv_{what}")
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    if device.index == torch.cuda.current_device():
        abi.check(entry(ctypes.byref(params), stream), what)
        return
    with torch.cuda.device(device):
        abi.check(entry(ctypes.byref(params), stream), what)
