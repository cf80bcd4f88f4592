# SPDX-License-Identifier: Apache-2.0
"""The exact law's cells and the test of draws against it, on a small Markov chain. No GPU, no SGLang."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from law import DEPTH, ELSE, Cell, Rule, cell_of, chi_square, fit, law, rounding, tail, together

VOCABULARY, DRAWS = 12, 3000
CHAIN = torch.log_softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)), -1)


def next_laws(strings: Sequence[Cell]) -> list[torch.Tensor]:
    """The next token depends on the last one; 0 stands before the first."""
    return [CHAIN[string[-1] if string else 0].double() for string in strings]


def drawn(rule: Rule, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.stack([rule.apply(row) for row in CHAIN])
    last, columns = torch.zeros(DRAWS, dtype=torch.int64), []
    for _ in range(DEPTH):
        last = torch.multinomial(probabilities[last], 1, generator=generator)[:, 0]
        columns.append(last)
    return torch.stack(columns, 1).tolist()


RULES = [Rule(), Rule(0.8, 4)]


@pytest.mark.parametrize("rule", RULES)
def test_cells_are_a_partition(rule: Rule) -> None:
    cells = law(next_laws, DRAWS, (rule, Rule(1.3)))
    assert [sum(p[i] for p in cells.values()) for i in (0, 1)] == pytest.approx([1, 1])
    for tokens in drawn(Rule(), 5)[:500]:
        assert cell_of(tokens, cells) in cells


def test_a_cell_is_the_product_of_the_steps() -> None:
    cells = law(next_laws, DRAWS, (Rule(),))
    whole = max((cell for cell in cells if ELSE not in cell), key=lambda cell: cells[cell][0])
    steps = [CHAIN[before, token].exp().item() for before, token in zip((0, *whole), whole, strict=False)]
    assert cells[whole][0] == pytest.approx(torch.tensor(steps).prod().item(), rel=1e-5)
    assert cells[(ELSE,)][0] == pytest.approx(
        1 - sum(CHAIN[0].exp()[token].item() for token in {cell[0] for cell in cells} - {ELSE}), abs=1e-6
    )


@pytest.mark.parametrize("rule", RULES)
def test_own_draws_fit_and_others_do_not(rule: Rule) -> None:
    cells = law(next_laws, DRAWS, (rule, Rule(1.3)))
    found = [fit(drawn(rule, seed), cells) for seed in range(20)]
    assert together(found).p > 1e-3
    assert sum(test.p < 0.1 for test in found) < 9
    assert fit(drawn(rule, 7), cells, 1).p < 1e-6
    assert fit(drawn(Rule(1.1), 8), cells).p < 1e-3


def test_top_k_keeps_the_likeliest() -> None:
    p = Rule(0.5, 3).apply(torch.tensor([0.5, 0.25, 0.15, 0.1]).log())
    assert p.tolist() == pytest.approx([0.25 / 0.335, 0.0625 / 0.335, 0.0225 / 0.335, 0])
    assert Rule(0.5, 3).sampling(4) == {"temperature": 0.5, "top_k": 3, "max_new_tokens": 4, "ignore_eos": True}


def test_tail_against_the_table() -> None:
    assert [tail(3.841, 1), tail(18.307, 10), tail(124.342, 100)] == pytest.approx([0.05] * 3, rel=1e-3)


def test_statistic_by_hand_and_pooling() -> None:
    found = chi_square([30, 60, 4, 6], [40, 50, 4, 6])
    assert (found.statistic, found.freedom) == (pytest.approx(2.5 + 2.0), 2)  # 4 expects too few: it joins the 6
    assert chi_square([50, 40, 4, 6], [40, 50, 4, 6]).freedom == 2
    assert chi_square([3, 3, 94], [3, 3, 94]).freedom == 1  # two rare cells make one


def test_a_draw_where_none_is_possible_fails() -> None:
    assert chi_square([50, 49, 1], [50, 50, 0]).p == 0
    assert chi_square([50, 50, 0], [50, 50, 1e-14]).p == pytest.approx(1)


def test_rounding_counts_the_difference() -> None:
    assert rounding({(1,): [0.5], (2,): [0.5]}, {(1,): [0.6], (2,): [0.4]}, 100) == pytest.approx(4)
