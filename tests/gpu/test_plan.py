# SPDX-License-Identifier: Apache-2.0
"""mla_plan on the GPU against its mirror on the host, and the paths a card offers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from treeverify.attention import abi, cases, ops, paths, plan

pytestmark = pytest.mark.gpu


def lengths(bs: int, longest: int, seed: int) -> torch.Tensor:
    """int64 [bs], very uneven; some are 0."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(bs, generator=generator).pow(4)
    return (scale * longest).long() * (torch.rand(bs, generator=generator) > 0.1)


@pytest.mark.parametrize("longest", [1, 64, 5000, 262_144])
@pytest.mark.parametrize("spare", [0, 1, 66, 500])
@pytest.mark.parametrize("bs", [1, 2, 7, 31, 32, 33, 64, 500])
def test_matches_the_host(bs, spare, longest):
    kv = lengths(bs, longest, seed=bs + spare)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), kv.cumsum(0)]).int().cuda()
    out = torch.full((plan.plan_size(bs) + 2,), -7, dtype=torch.int32, device="cuda")
    ops.mla_plan(indptr, bs, bs + spare, out)
    assert out.tolist() == [*plan.planned(kv.tolist(), bs + spare), -7, -7]


def test_the_most_requests_there_can_be():
    indptr = torch.arange(0, 1025 * 100, 100, dtype=torch.int32, device="cuda")
    out = torch.zeros(2049, dtype=torch.int32, device="cuda")
    ops.mla_plan(indptr, 1024, 1024, out)
    assert out.tolist() == [*range(1025), *range(1024)]
    with pytest.raises(ValueError, match="a plan has at least one each and 1024 at most"):
        ops.mla_plan(indptr, 1024, 1025, out)


def test_paths_are_those_of_the_card():
    found = paths.testable(torch.device("cuda"))
    hopper = torch.cuda.get_device_capability() == (9, 0)
    expected = [abi.PATH_HOPPER, abi.PATH_PORTABLE, abi.PATH_NARROW] if hopper else [abi.PATH_PORTABLE]
    assert [t.path for t in found] == expected
    assert found[-1].max_row_tile == plan.PORTABLE_ROW_TILE
    assert not hopper or found[0].max_row_tile == plan.HOPPER_ROW_TILE
    assert [t.many_rows for t in found] == [t.path == abi.PATH_HOPPER for t in found]


@pytest.mark.parametrize(("n", "few"), [(1, True), (2, False)])
@pytest.mark.parametrize("pool", paths.FP8)
def test_few_rows_of_an_fp8_pool_take_the_portable_path(pool, n, few):
    device = torch.device("cuda")
    taken = paths.target(device, kv_dtype=pool).of(n, 8)
    if torch.cuda.get_device_capability() == (9, 0):
        assert taken.path == (abi.PATH_PORTABLE if few else abi.PATH_HOPPER)
    assert not taken.many_rows, "8 blocks of 72 rows, not 9 of 64, for 9 tokens of 64 heads"
    step = cases.make_case([700, 20], n, 8, nsplit=3, **cases.pool_of(pool))
    expected = dataclasses.replace(step, path=taken.path).run()
    assert torch.equal(step.run(), expected), "AUTO is that path, to the bit"
