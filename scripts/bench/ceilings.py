# SPDX-License-Identifier: Apache-2.0
"""What this card reaches on the plainest work: reading, copying, a large matrix product, a bare mma.sync loop."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from .timer import Timer

SOURCE = Path(__file__).with_name("mma_rate.cu")
MMA_ITERATIONS = 20_000
MMA_LAUNCHES = ((1, 256), (1, 512), (2, 256), (2, 512))
"""Blocks a multiprocessor and threads a block; the best counts."""


def measure(timer: Timer) -> dict[str, float]:
    """GB/s of a large read and of a copy (both ways counted), TFLOP/s of an 8192^3 bf16 product and of mma.sync."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    wide = x.view(torch.float32)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "read_gbs": x.nbytes / timer(wide.sum) / 1e3,
        "copy_gbs": 2 * x.nbytes / timer(lambda: torch.add(x, 0, out=y)) / 1e3,
        "matmul_tflops": 2 * 8192**3 / timer(lambda: m @ m) / 1e6,
        "mma_tflops": mma_rate(timer),
    }


def mma_rate(timer: Timer) -> float:
    """TFLOP/s of mma.sync m16n8k16 on bf16 with fp32 sums, operands in registers, all multiprocessors busy."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder), f"sm_{properties.major}{properties.minor}")
    sink = torch.empty(1, device="cuda")

    def rate(blocks: int, threads: int) -> float:
        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            code = library.mma_launch(blocks, threads, MMA_ITERATIONS, sink.data_ptr(), stream)
            if code:
                raise RuntimeError(f"mma_rate.cu: its launch gives cudaError {code}")

        return float(library.mma_flops(blocks, threads, MMA_ITERATIONS)) / timer(launch) / 1e6

    return max(rate(per_sm * properties.multi_processor_count, threads) for per_sm, threads in MMA_LAUNCHES)


def build(folder: Path, arch: str) -> ctypes.CDLL:
    """Compiles mma_rate.cu for `arch` (like sm_90) into `folder` and loads it.

    Raises:
        RuntimeError: no nvcc, or it fails.
    """
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        raise RuntimeError(f"{SOURCE.name} needs nvcc; not on PATH: install the CUDA toolkit or add its bin folder")
    target = folder / "mma_rate.so"
    options = ["-O3", "-std=c++17", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC"]
    command: list[str | Path] = [nvcc, *options, "-o", target, SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc cannot build {SOURCE.name} for {arch}:\n{done.stderr[-2000:]}")
    library = ctypes.CDLL(str(target))
    library.mma_flops.restype = ctypes.c_double
    library.mma_launch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return library
