# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the estimate."""

from __future__ import annotations

import pytest
from bench import estimate
from bench.shapes import BASELINES, Shape
from treeverify.attention.plan import choose_nsplit


def test_the_card_makes_a_product_in_four_cycles():
    assert estimate.RTX_PRO_6000.cycles_a_product == pytest.approx(4, rel=1e-3)


def test_products_of_a_pass_cover_its_pairs():
    """16 positions by 48 rows by 1088 multiply-adds, nothing idle."""
    assert sum(estimate.products(48)) * estimate.WARPS * estimate.MMA_MACS == 16 * 48 * 1088


def test_products_bind_at_many_rows_and_memory_at_few():
    many = estimate.model(estimate.RTX_PRO_6000, Shape(8, 64, 9, 32768))
    few = estimate.model(estimate.RTX_PRO_6000, Shape(1, 8, 1, 200_000))
    assert (many.bound, few.bound) == ("matrix products", "memory")
    assert few.us == pytest.approx(200_001 * 1152 / 1792e3, rel=1e-3)


def test_a_wave_of_blocks_takes_its_passes():
    shape = Shape(1, 8, 6, 64 * 188)  # 48 rows: one row block, and nsplit blocks in one wave
    nsplit = choose_nsplit(1, 6, 8, 188)
    assert nsplit <= 188
    passes = -(-(shape.kv + 6) // nsplit // 64) * 64 / 16
    got = estimate.model(estimate.RTX_PRO_6000, shape)
    assert got.us == pytest.approx(max(passes * 51 * 8 * 4 / 2.617e3, shape.kv_tokens * 1152 / 1792e3), rel=0.05)


def test_an_estimate_scales_what_was_measured_and_says_it_is_none():
    ceilings = {"mma_tflops": 600.0, "read_gbs": 4300.0}
    here = estimate.model(estimate.h200(ceilings), BASELINES[2])
    rows = estimate.rows({BASELINES[2]: 2 * here.us}, ceilings)
    assert [row["measured"] for row in rows] == [False] * len(BASELINES)
    assert [row["estimate_us"] is not None for row in rows] == [shape == BASELINES[2] for shape in BASELINES]
    assert rows[2]["estimate_us"] == pytest.approx(2 * rows[2]["model_us"], rel=0.01)
