# SPDX-License-Identifier: Apache-2.0
"""What must not matter does not, and what must not happen is told: pages that others freed, stale rows, wild indices.

(Other files: unused slots that hold NaN, contexts to the limit, 63, 64 and 65 draft tokens, pools past 2^31 elements.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from applier.arch import found_gpus, parse_arches, runs_on
from applier.kernels import build
from applier.layout import CHECKOUT
from treeverify.attention import abi, cases, ops, paths, plan, reference

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


def fill(pool: torch.Tensor, slots: torch.Tensor, what: str, seed: int = 0) -> None:
    """Writes into these rows of a pool: NaN, infinities, or random bytes, of which many are wild numbers."""
    width = pool[0].numel() * pool.element_size()
    generator = torch.Generator("cuda").manual_seed(seed)
    if what == "bytes":
        raw = torch.randint(0, 256, (len(slots), width), generator=generator, device="cuda", dtype=torch.uint8)
    else:
        values = torch.full((len(slots), pool[0].numel()), float(what), device="cuda").to(pool.dtype)
        raw = values.view(torch.uint8)
    pool.view(torch.uint8).view(pool.shape[0], -1)[slots] = raw


@pytest.mark.parametrize("what", ["nan", "-inf", "bytes"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("planned", [False, True])
def test_freed_pages_may_hold_anything(make_case, planned, kv_dtype, what):
    """Between two replays all slots that no request of the batch has are written over, as those of freed pages are."""
    case = make_case([700, 0, 65, 4097], 17, 8, kv=kv_dtype, plan=planned, padded=2, extra_tokens=3)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    case.poison()
    graph.replay()
    before = case.out.clone()
    assert reference.worst_row_error(before, case.expected()) <= 5e-3
    free = torch.ones(case.pool.shape[0], dtype=torch.bool, device="cuda")
    free[case.kv_indices.long()] = False
    assert free.any()
    for seed in range(3):
        fill(case.pool, free.nonzero().flatten(), what, seed)
        case.poison()
        graph.replay()
        assert torch.equal(case.out, before)


def test_a_page_that_a_request_has_does_matter(make_case):
    """Negative control: one such slot among those of a request shows."""
    case = make_case([700], 17, 8)
    fill(case.pool, case.kv_indices[5:6].long(), "nan")
    assert case.run().isnan().any()


@pytest.mark.parametrize("stale", [-1, 1 << 40, 7])
@pytest.mark.parametrize("kind", [abi.MASK_NONE, abi.MASK_FULL, abi.MASK_QLEN])
def test_stale_rows_of_a_bucket_touch_nothing(path, kind, stale):
    """A bucket of four with two requests: what is left of others in the index arrays, the lengths and the pool."""
    real, bs, n, heads, width = 2, 4, 9, 8, 600
    prefixes, device = [500, 33], torch.device("cuda")
    slots = sum(prefixes) + real * n
    order = torch.randperm(slots, device=device, dtype=torch.int32)
    table = torch.full((8, width), -5, dtype=torch.int32, device=device)
    table[3, : 500 + n], table[6, : 33 + n] = order[: 500 + n], order[500 + n :]
    rows = torch.tensor([3, 6, stale, stale], device=device)
    lens = torch.tensor([*prefixes, stale, 2**62], device=device)
    visible = cases.random_trees(real, n, torch.Generator().manual_seed(1), device)
    if kind == abi.MASK_NONE:
        visible[:] = reference.causal(n, device)
    mask = cases.prep_mask(kind, visible, prefixes)
    indptr = torch.full((bs + 1,), -1, dtype=torch.int32, device=device)
    indices = torch.full((bs * width,), -1, dtype=torch.int32, device=device)
    packed = torch.full((bs * n * plan.mask_words(n),), -1, dtype=torch.int64, device=device)
    ops.mla_prep(table, rows, lens, mask, kind, real, bs, n, indptr, indices, packed)
    case = cases.make_case(prefixes, n, heads, path=path, padded=bs - real, pool=_pool(slots))
    case.kv_indptr, case.kv_indices, case.mask, case.mask_kind = indptr, indices, packed, abi.MASK_PACKED
    case.visible[:real] = visible
    out = case.run()
    assert reference.worst_row_error(out, case.expected()) <= 5e-3
    assert not out[real * n :].any() and indptr[real:].tolist() == [slots] * (bs - real + 1)


def _pool(slots: int) -> torch.Tensor:
    return torch.randn(slots, 1, plan.KEY_DIM, device="cuda").to(torch.bfloat16)


@pytest.fixture(scope="module")
def debug_library() -> Path:
    """The library that checks its indices, for this card: two units more than the usual one."""
    return build(CHECKOUT, parse_arches(found_gpus()[0].arch), debug=True).library


def step(library: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "out_of_range.py"), *words]
    return subprocess.run(
        command, env={**os.environ, "TREEVERIFY_LIBRARY": str(library)}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("how", [[], ["captured"]])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("slot", "request 2: slot of KV position 100 is"),
        ("draft", "request 1: slot of draft row 4 is -1, expected 0 <= it <"),
        ("row", "request 1: row of req_to_token, entry 1 is 3, expected 0 <= it < 3"),
    ],
)
def test_a_debug_build_names_what_is_out_of_range_and_stops(debug_library, wrong, said, how):
    run = step(debug_library, wrong, *how)
    assert run.returncode != 0 and "went through" not in run.stdout
    assert f"treeverify: {said}" in run.stdout + run.stderr
    assert "CUDA error" in run.stderr


@pytest.mark.parametrize("how", [[], ["captured"]])
def test_a_debug_build_lets_a_right_step_through(debug_library, how):
    run = step(debug_library, "none", *how)
    assert run.returncode == 0 and "went through" in run.stdout, run.stderr[-2000:]


OBSTACLE = """
import torch
from treeverify import gates
print(gates._failure(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, 0))
"""


def obstacle(library: Path) -> str:
    """What a server that starts with this library is refused with."""
    told = {**os.environ, "TREEVERIFY_LIBRARY": str(library), "PYTHONPATH": str(HERE.parents[1] / "overlay" / "srt")}
    run = subprocess.run([sys.executable, "-c", OBSTACLE], env=told, capture_output=True, text=True, timeout=120)
    return run.stdout + run.stderr


def test_a_library_that_is_missing_is_told_with_the_way_out(tmp_path):
    told = obstacle(tmp_path / "none.so")
    assert "none.so" in told and "Run `apply.py apply --sglang" in told


def test_a_library_of_another_architecture_is_told_with_the_way_out():
    gpu = found_gpus()[0]
    built = (CHECKOUT.build / "kernels").glob("*/libtreeverify.so")
    others = [library for library in built if not any(runs_on(arch, gpu) for arch in library.parent.name.split("_"))]
    if not others:
        pytest.skip("no library for another card is built here: apply.py build --arch 120 makes one")
    told = obstacle(others[0])
    assert "no kernel image" in told and "Run `apply.py apply --sglang" in told


def test_the_usual_library_has_no_checks():
    assert "debug" not in abi.library_path().name and paths.target(torch.device("cuda")).max_row_tile > 0
