# SPDX-License-Identifier: Apache-2.0
"""Loops read off a disassembly, and the arithmetic of the estimate."""

from __future__ import annotations

import pytest
from bench import estimate, sass
from bench.sass import Loop
from bench.shapes import BASELINES, Shape
from treeverify.attention.plan import choose_nsplit

LISTING = """
        Function : some_kernel
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                   /* 0x0000df00ff017b82 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;      /* 0x000000024404723c */
        /*0020*/                   LDSM.16.MT88.4 R8, [R20] ;                /* 0x000000001408783b */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64] ; /* 0x0000000006037fae */
        /*0040*/                   LDS.64 R6, [R9] ;                         /* 0x0000000009067984 */
        /*0050*/                   HMMA.16816.F32.BF16 R12, R8, R2, R12 ;    /* 0x000000020c0c723c */
        /*0060*/                   HMMA.16816.F32.BF16 R16, R8, R2, R16 ;    /* 0x0000000210107c3c */
        /*0070*/              @!P0 BRA 0x20 &req={4} ?trans5;                /* 0xfffffffc00a80947 */
        /*0080*/               @P1 BRA 0x0 ;                                 /* 0xfffffffc00a80947 */
        /*0090*/                   STS.128 [R3], R4 ;                        /* 0x0000000403007388 */
        /*00a0*/                   BRA 0xa0;                                 /* 0xfffffffc00fc7947 */
"""


def test_the_main_loop_is_the_one_with_most_products_and_no_more():
    """The outer loop has three products, the inner two: the outer one is the pass."""
    assert sass.main_loop(list(sass.parse(LISTING))) == Loop(mma=3, all=9, shared_cycles=4 + 4 + 2)


def test_of_loops_with_the_same_products_the_shortest_counts():
    inner_only = LISTING.replace("HMMA.16816.F32.BF16 R4, R8, R2, R4", "IADD3 R4, R8, R2, R4")
    assert sass.main_loop(list(sass.parse(inner_only))) == Loop(mma=2, all=6, shared_cycles=4 + 4 + 2)


def test_code_without_products_is_refused():
    with pytest.raises(ValueError, match="no loop with matrix products"):
        sass.main_loop(list(sass.parse(LISTING.replace("HMMA", "IADD3"))))


def test_positions_follow_from_the_products():
    """8 warps of 85 products cover 32 positions of 40 rows, 1088 multiply-adds a pair; a few more are padding."""
    assert Loop(85, 0, 0).positions(warps=8, rows=40, macs_a_pair=1088) == 32
    assert Loop(100, 0, 0).positions(warps=8, rows=40, macs_a_pair=1088) == 32


def test_the_card_makes_a_product_in_four_cycles():
    assert estimate.RTX_PRO_6000.cycles_a_product == pytest.approx(4, rel=1e-3)


def loop_of(tile: int) -> Loop:
    return Loop(mma=17 * tile // 8, all=200, shared_cycles=50)  # 32 positions a pass


def test_products_bind_at_many_rows_and_memory_at_few():
    many = estimate.model(estimate.RTX_PRO_6000, loop_of, Shape(8, 64, 9, 32768))
    few = estimate.model(estimate.RTX_PRO_6000, loop_of, Shape(1, 8, 1, 200_000))
    assert (many.bound, few.bound) == ("matrix products", "memory")
    assert few.us == pytest.approx(200_001 * 1152 / 1792e3, rel=1e-3)


def test_a_wave_of_blocks_takes_its_passes():
    shape = Shape(1, 8, 6, 64 * 188)  # 48 rows: one row block, and nsplit blocks in one wave
    nsplit = choose_nsplit(1, 6, 8, 188)
    assert nsplit <= 188
    passes = -(-(shape.kv + 6) // nsplit // 64) * 64 / 32
    got = estimate.model(estimate.RTX_PRO_6000, lambda tile: Loop(102, 5000, 0), shape)
    assert got.bound == "instruction issue"
    assert got.us == pytest.approx(passes * 5000 * 8 / 4 / 2.617e3, rel=0.05)


def test_an_estimate_scales_what_was_measured_and_says_it_is_none():
    ceilings = {"mma_tflops": 600.0, "read_gbs": 4300.0}
    here = estimate.model(estimate.h200(ceilings), loop_of, BASELINES[2])
    rows = estimate.rows(loop_of, loop_of, {BASELINES[2]: 2 * here.us}, ceilings)
    assert [row["measured"] for row in rows] == [False] * len(BASELINES)
    assert [row["estimate_us"] is not None for row in rows] == [shape == BASELINES[2] for shape in BASELINES]
    assert rows[2]["estimate_us"] == pytest.approx(2 * rows[2]["model_us"], rel=0.01)
