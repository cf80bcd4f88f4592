# SPDX-License-Identifier: Apache-2.0
"""The parts of an adaptive budget: widths, cost curve, acceptance, the rest of a step, and the choice."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeverify.ddtree.budget.acceptance import KEPT, Acceptance
from treeverify.ddtree.budget.choose import SLACK, best, rates
from treeverify.ddtree.budget.controller import LISTEN, TRY_WIDER, Budget
from treeverify.ddtree.budget.curve import Costs, Curve, isotonic
from treeverify.ddtree.budget.measure import LIMIT_S, contexts_up_to, schedule
from treeverify.ddtree.budget.rest import EVERY, FIRST, FRESH, Rest
from treeverify.ddtree.budget.rest import KEPT as KEPT_STEPS
from treeverify.ddtree.budget.widths import RUNGS, ladder
from treeverify.ddtree.tree import Path


@pytest.mark.parametrize(
    ("ceiling", "block", "widths"),
    [(64, 8, (8, 16, 32, 64)), (32, 8, (8, 16, 32)), (16, 16, (16,)), (24, 8, (8, 12, 24)), (17, 16, (16, 17)),
     (256, 8, (8, 25, 81, 256)), (3, 2, (2, 3))],
)  # fmt: skip
def test_widths_are_halves_or_further_apart(ceiling, block, widths):
    assert ladder(ceiling, block) == widths


@given(ceiling=st.integers(2, 256), block=st.integers(2, 256))
def test_widths_lie_between_block_and_ceiling(ceiling, block):
    ceiling = max(ceiling, block)
    widths = ladder(ceiling, block)
    assert widths[0] == block and widths[-1] == ceiling and len(widths) <= RUNGS
    assert list(widths) == sorted(set(widths))


SECONDS = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6)


@given(values=SECONDS)
def test_isotonic_is_the_closest_non_decreasing_sequence(values):
    """Against the closed form: max over starts of min over ends of the mean between them."""
    n = len(values)
    expected = [
        max(min(statistics.fmean(values[a : b + 1]) for b in range(i, n)) for a in range(i + 1)) for i in range(n)
    ]
    assert isotonic(values) == pytest.approx(expected)


@given(table=st.lists(st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_neither_nodes_nor_context_make_a_pass_cheaper(table):
    costs = Costs.of((1024, 4096, 16384), table)
    for row in costs.seconds:
        assert list(row) == sorted(row)
    for column in zip(*costs.seconds, strict=True):
        assert list(column) == sorted(column)


def test_between_contexts_and_batches_the_curve_is_linear():
    small = Costs((1000, 3000), ((1.0, 2.0), (2.0, 6.0)))
    curve = Curve((8, 16), (1, 2, 4), {1: small, 4: Costs((1000,), ((3.0,), (4.0,)))})
    assert curve.seconds(1, 1000) == [1.0, 2.0]
    assert curve.seconds(1, 2000) == [1.5, 4.0]
    assert curve.seconds(1, 10) == [1.0, 2.0], "no less than at the first"
    assert curve.seconds(1, 5000) == [3.0, 10.0], "on past the last"
    assert curve.seconds(3, 4000) == curve.seconds(4, 4000) == [3.0, 4.0], "three run in the graph of four"
    assert curve.seconds(9, 36000) == [3.0, 4.0] and curve.bucket(9) == 4
    assert curve.seconds(2, 4000) == pytest.approx([1.5 + (3 - 1.5) / 3, 4.0])
    assert "batch 1 1000: 1000.00/2000.00, 3000: 2000.00/6000.00; batch 4" in curve.line()


POSITIVE = st.floats(0.01, 100)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=4), st.integers(1, 64))
def test_the_choice_is_that_of_brute_force(cells, bs):
    tokens, seconds = zip(*cells, strict=True)
    found = best(rates(bs, tokens, seconds))
    of = [bs * t / s for t, s in cells]
    assert of[found] == max(of) and of.index(max(of)) == found, "the smallest of equal ones"


def test_flat_acceptance_takes_the_smallest_and_free_nodes_the_largest():
    assert best(rates(4, [3.0] * 4, [1.0, 1.1, 1.2, 1.5])) == 0
    assert best(rates(4, [3.0] * 4, [1.0] * 4)) == 0
    assert best(rates(4, [2.0, 2.5, 2.7, 2.8], [1.0] * 4)) == 3
    assert best(rates(4, [2.0, 3.0, 3.4, 3.5], [1.0, 1.2, 1.6, 2.4])) == 1, "the peak"


def test_a_choice_is_kept_within_the_slack():
    assert best([1.0, 1.0 + SLACK / 2], current=0) == 0
    assert best([1.0, 1.0 + SLACK * 2], current=0) == 1
    assert best([1.0, 1.0], current=1) == 1


def path(*nodes: int) -> Path:
    return Path(16, [0, *nodes], [5] * (len(nodes) + 1))


def test_a_step_tells_of_every_narrower_width():
    found = Acceptance((4, 8, 16))
    promise = [1.0] + [0.4] * 15
    for _ in range(2000):
        found.observe(16, [path(1, 3, 5, 9), path(2)], promise)
    assert found.tokens() == pytest.approx([1 + 1.5, 1 + 2.0, 1 + 2.5], rel=0.02)


def test_what_is_not_verified_is_promised_at_the_last_known_share():
    found = Acceptance((4, 8))
    promise = [1.0] + [0.5] * 7
    for _ in range(1000):
        found.observe(8, [path(1, 4)], promise)  # 1 of 1.5 promised; 1 of 2
    before = found.tokens()
    for _ in range(64):
        found.observe(4, [path(1)], [1.0] + [0.5] * 7)
    assert found.tokens() == pytest.approx(before, rel=0.03)
    for _ in range(400):
        found.observe(4, [path(1)], [1.0] + [0.5] * 3 + [0.05] * 4)
    assert found.tokens()[1] - found.tokens()[0] < 0.2, "the drafter promises less there now"


def test_a_promise_is_believed_at_first_and_without_the_rungs_it_lacks_the_last_one_stays():
    found = Acceptance((4, 8))
    assert found.tokens() == [1.0, 1.0]
    found.observe(4, [path()], [1.0, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert found.tokens()[1] - found.tokens()[0] == pytest.approx(0.4)
    found.observe(4, [path()], [1.0, 0.9, 0.9, 0.9])
    assert found.tokens()[1] - found.tokens()[0] == pytest.approx(0.4)


def test_a_share_follows_within_its_memory():
    found, promise = Acceptance((4,)), [1.0, 0.5, 0.5, 0.5]
    for taken in (0, 3):
        for _ in range(int(5 / KEPT)):
            found.observe(4, [path(*range(1, taken + 1))], promise)
        assert found.tokens()[0] == pytest.approx(1 + taken, abs=0.05)


def test_the_rest_is_a_median_that_rank_0_tells_now_and_then():
    told: list[float] = []
    rest = Rest(lambda value: told.append(value) or 7.0)
    assert rest.at(1, 8) is None
    for i in range(FIRST):
        rest.add(4, 16, 100.0 if i == 0 else 1.0)
    assert told == [1.0] and rest.at(4, 16) == 7.0
    assert rest.at(1, 64) == 7.0, "of what is known"
    for _ in range(EVERY - FIRST):
        rest.add(4, 16, 2.0)
    assert told == [1.0, 2.0] and KEPT_STEPS < EVERY


def test_the_rest_is_that_of_the_nearest_batch_and_width():
    rest = Rest(float)
    for bucket, width, seconds in ((1, 8, 1.0), (8, 8, 2.0), (8, 64, 3.0)):
        for _ in range(FIRST):
            rest.add(bucket, width, seconds)
    assert [rest.at(1, 64), rest.at(6, 8), rest.at(8, 48), rest.at(8, 9)] == [1.0, 2.0, 3.0, 2.0]


def test_a_width_that_was_not_served_lately_is_taken_for_its_neighbour():
    rest = Rest(float)
    for bucket, width, seconds in ((1, 8, 9.0), (4, 8, 9.0)):
        for _ in range(FIRST):
            rest.add(bucket, width, seconds)
    for _ in range(EVERY):
        rest.add(4, 16, 2.0)
    assert rest.at(4, 8) == 9.0
    for _ in range(FRESH):
        rest.add(4, 16, 2.0)
    assert rest.at(4, 8) == 2.0 and rest.at(1, 8) == 9.0, "each batch size by its own steps"


CURVE = Curve((8, 16), (1, 4), {1: Costs((1024,), ((1.0,), (1.5,))), 4: Costs((1024,), ((1.0,), (4.0,)))})


def steps(budget: Budget, clock: list[float], count: int, bs: int = 1, taken: int = 2) -> list[int]:
    """Widths of some steps, which cost the curve's pass and half a second more."""
    widths = []
    for _ in range(count):
        width = budget.begin(bs, 1024 * bs)
        budget.observe([path(*range(1, taken + 1))] * bs, [1.0] + [0.1] * 15)
        clock[0] += dict(zip(budget.widths, CURVE.seconds(bs, 1024 * bs), strict=True))[width] + 0.5
        widths.append(width)
    return widths


def test_the_largest_until_the_rest_is_known_then_what_pays():
    clock = [0.0]
    budget = Budget(CURVE, clock=lambda: clock[0])
    assert steps(budget, clock, FIRST + 1) == [16] * FIRST + [8]


def test_time_that_is_not_a_steps_is_not_counted():
    clock = [0.0]
    budget = Budget(CURVE, clock=lambda: clock[0], believed=[2.0, 2.5])  # 2 / 1.5 beats 2.5 / 2
    assert steps(budget, clock, FIRST + 1)[-1] == 8
    for _ in range(300):
        budget.pause()
        clock[0] += 1000.0
        steps(budget, clock, 2)
    assert steps(budget, clock, 1) == [8], "with 1000 s more a step, 16 would be better"


def test_wider_trees_are_heard_of_and_tried_where_they_may_be_worth_it():
    clock = [0.0]
    budget = Budget(CURVE, clock=lambda: clock[0], believed=[2.0, 2.5])
    widths = steps(budget, clock, 10 * TRY_WIDER)
    assert widths[FIRST:].count(16) == 10
    listened = []
    for _ in range(8 * LISTEN):
        steps(budget, clock, 1)
        listened.append(budget.listens)
    assert listened.count(True) == 8
    hopeless = Budget(CURVE, clock=lambda: clock[0], believed=[2.0, 2.0])
    assert steps(hopeless, clock, 10 * TRY_WIDER)[FIRST:].count(16) == 0


def test_batches_are_decided_each_for_itself():
    clock = [0.0]
    budget = Budget(CURVE, clock=lambda: clock[0], believed=[2.0, 3.2])
    steps(budget, clock, FIRST)
    found = [(steps(budget, clock, 1, bs=1)[0], steps(budget, clock, 1, bs=3)[0]) for _ in range(20)]
    assert set(found) == {(16, 8)}


def test_ranks_with_clocks_of_their_own_choose_alike():
    told: list[float] = []
    ticks = random.Random(0), random.Random(1)
    now = [0.0, 0.0]

    def rank_0(value: float) -> float:
        told.append(value)
        return value

    budgets = Budget(CURVE, rank_0, clock=lambda: now[0]), Budget(CURVE, lambda _: told[-1], clock=lambda: now[1])
    draw, widths = random.Random(2), []
    for _ in range(600):
        bs, taken = draw.randint(1, 6), draw.randint(0, 7)
        for rank, budget in enumerate(budgets):
            widths.append(budget.begin(bs, bs * 2000))
            budget.observe([path(*range(1, taken + 1))] * bs, [1.0] + [0.4] * 7 + [0.05] * 8)
            now[rank] += 1.0 + 5 * rank + ticks[rank].random()
    assert widths[::2] == widths[1::2] and len(set(widths)) == 2 and len(told) > 5


@pytest.mark.parametrize(
    ("longest", "found"), [(200_000, (1024, 4096, 16384, 65536, 200_000)), (70_000, (1024, 4096, 16384, 65536)),
                           (8192, (1024, 4096, 8192)), (300, (300,)), (-5, (1,))]
)  # fmt: skip
def test_contexts_go_to_the_limit(longest, found):
    assert contexts_up_to(longest) == found


@settings(max_examples=50)
@given(longest=st.floats(1e-4, 2.0), count=st.integers(1, 40))
def test_measuring_fits_into_its_time(longest, count):
    cells = dict.fromkeys(range(1, count + 1), 20)
    sizes, repeats = schedule(cells, longest)
    assert sizes[0] == 1 and sizes[-1] == count and 1 <= repeats <= 5
    taken = (repeats + 1) * 20 * len(sizes) * longest / 2
    assert taken <= LIMIT_S or len(sizes) <= 2
