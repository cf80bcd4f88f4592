# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the kernels: products as counted on paper, no spills, wgmma on sm_90a and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sass_counts
from bench import estimate

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def counts(source: str, arch: str, folder: Path, *flags: str) -> dict[str, dict[str, int]]:
    """Instructions by kernel and group of one unit, compiled for one architecture."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    cubin = folder / "kernel.cubin"
    options = ["-std=c++17", "-O3", f"-I{KERNELS}", f"-arch=sm_{arch}", *flags]
    subprocess.run([nvcc, *options, "-cubin", "-o", str(cubin), str(KERNELS / source)], check=True)
    return sass_counts.counts(cubin, arch)


def portable_products(rows: int, positions: int) -> int:
    """Products in a warp's code, of a tile of `positions`: those that the estimate for sm_120 counts on.

    The code has half of the value products twice, with the softmax and without, and all of them once more behind the
    loop.
    """
    scores, values = estimate.products(rows)
    return positions // estimate.POSITIONS * (scores + values * 5 // 2)


@pytest.mark.parametrize("rows", [8, 48])
def test_portable_on_sm_120(rows, tmp_path):
    found = counts(f"portable/inst/verify_bf16_r{rows}.cu", "120", tmp_path)[f"tv_verify_bf16_r{rows}"]
    assert found["HMMA"] == portable_products(rows, 16)
    assert found["spill"] == 0 and found["LDGSTS"] > 0


def test_wide_on_sm_90a(tmp_path):
    found = counts("portable/inst/verify_wide_bf16_r48.cu", "90a", tmp_path)["tv_verify_wide_bf16_r48"]
    assert found["HMMA"] == portable_products(48, 32)
    assert found["spill"] == 0 and found["HGMMA"] == 0


def test_fp8_on_sm_120(tmp_path):
    """As many products as of bf16; what widens an element is one instruction a pair, not arithmetic."""
    found = counts("portable/inst/verify_e4m3_r48.cu", "120", tmp_path)["tv_verify_e4m3_r48"]
    assert found["HMMA"] == portable_products(48, 16)
    assert found["spill"] == 0 and found["LDGSTS"] > 0
    scores, values = 36, 16  # conversions of a tile in a warp: of its slice of K, of its dimensions of V
    assert found["E4M3"] == scores + values * 5 // 2


@pytest.mark.parametrize("rows", ["r72", "m64"])
def test_hopper_on_sm_90a(rows, tmp_path, capfd):
    found = counts(f"hopper/inst/verify_bf16_{rows}.cu", "90a", tmp_path)[f"tv_hopper_bf16_{rows}"]
    assert found["HGMMA"] > 0 and found["HMMA"] == 0
    assert found["spill"] == 0
    assert "instructions are serialized" not in capfd.readouterr().err, "ptxas waits after each product"


def test_hopper_of_fp8_on_sm_90a(tmp_path, capfd):
    """36 products for the scores, 16 for values: of a group's own tile, of the other's, and behind the loop."""
    found = counts("hopper/inst/verify_e4m3_r32.cu", "90a", tmp_path)["tv_hopper_e4m3_r32"]
    assert found["HGMMA"] == 36 + 16 + 16 + 16 and found["HMMA"] == 0
    assert found["spill"] == 0
    assert "instructions are serialized" not in capfd.readouterr().err, "ptxas waits after each product"


def test_hopper_of_many_rows_issues_its_products_once_a_tile(tmp_path):
    """36 for the scores; 4 for each part of the values, of a group's own tile, of the other's, and behind the loop."""
    found = counts("hopper/inst/verify_bf16_m64.cu", "90a", tmp_path)["tv_hopper_bf16_m64"]
    assert found["HGMMA"] == 2 * (36 + 8 + 8 + 8)


@pytest.mark.parametrize("unit", ["hopper/inst/verify_bf16_r72.cu", "portable/inst/verify_wide_bf16_r48.cu"])
def test_a_unit_of_another_architecture_has_no_kernel(unit, tmp_path):
    """An empty one would be launched there, and leave the output as it was."""
    assert counts(unit, "120", tmp_path, "-DTV_HOST_ONLY") == {}


@pytest.mark.parametrize(
    ("unit", "kernel"),
    [("tree/build.cu", "tv_build_tree"), ("tree/walk.cu", "tv_walk_tree"), ("kv/move.cu", "tv_kv_move_rows")],
)
def test_small_kernels_stay_in_registers(unit, kernel, tmp_path):
    assert counts(unit, "120", tmp_path)[kernel]["spill"] == 0


def test_rows_are_moved_sixteen_bytes_at_a_time(tmp_path):
    """A load and a store of them for each piece that a thread holds, and no narrower store to global memory."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    target = tmp_path / "move.ptx"
    options = ["-std=c++17", "-O3", f"-I{KERNELS}", "-arch=compute_80", "-ptx"]
    subprocess.run([nvcc, *options, "-o", str(target), str(KERNELS / "kv" / "move.cu")], check=True)
    ptx = target.read_text()
    stores = re.findall(r"st\.global\S*", ptx)
    assert len(re.findall(r"ld\.global\.v4\.\w32", ptx)) == len(stores) == 8
    assert all(store.startswith("st.global.v4.") for store in stores)
