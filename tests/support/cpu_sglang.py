# SPDX-License-Identifier: Apache-2.0
"""Makes real SGLang importable where torch is a CPU build.

PyPI's torchvision is compiled against the CUDA build of torch. Beside a CPU build its operators don't load, and its
Python part then stops at the two operators it registers a fake for without looking. ``prepare()`` declares them, so
that the rest imports; no test here detects an object or decodes an image. FlashInfer wants a libcudart in the process,
which a CPU build of torch doesn't load either.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def prepare() -> None:
    """Call once, before the first ``import sglang``. Does nothing under a CUDA build of torch."""
    if torch.version.cuda or _declared:
        return
    lib = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        lib.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(lib)
    _load_cudart()


def _load_cudart() -> None:
    """FlashInfer asks the process for a libcudart when it is imported; the CPU build of torch brings none."""
    import nvidia

    for root in nvidia.__path__:
        for path in sorted(Path(root).glob("cu*/lib/libcudart.so.*")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return
    raise RuntimeError("no libcudart among the nvidia packages; install nvidia-cuda-runtime")
