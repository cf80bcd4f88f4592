# SPDX-License-Identifier: Apache-2.0
"""The order of measuring: round after round, and what a run that was cut off leaves to the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.ddtree.modes import CHAIN, NONE, tree
from bench.ddtree.rows import KEY, Server
from bench.ddtree.speed import CELLS
from bench.ddtree.turns import ROUNDS, Turn, wanted
from bench.store import Store

SERVERS = [Server("speed", mode, "flashinfer", "a card", "a build") for mode in (NONE, CHAIN, tree(16))]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ddtree.json", KEY)


def take(turn: Turn, store: Store, servers: list[Server] = SERVERS, **more: str) -> None:
    for server in servers:
        store.add({**server.label(turn.cell, turn.round), "step_ms": 2.0, **more})


def test_a_run_that_is_cut_off_has_all_cells(store):
    turns = wanted(SERVERS, store)
    assert turns == [Turn(number, cell) for number in range(1, ROUNDS + 1) for cell in CELLS]
    for turn in turns[: len(CELLS) + 2]:
        take(turn, store)
    assert wanted(SERVERS, store) == turns[len(CELLS) + 2 :], "the cells that are behind come first"


def test_every_other_round_goes_backwards():
    assert Turn(1, CELLS[0]).order(SERVERS) == SERVERS and Turn(2, CELLS[0]).order(SERVERS) == SERVERS[::-1]


def test_a_round_that_was_cut_off_is_not_completed_but_measured_anew(store):
    take(Turn(1, CELLS[0]), store, SERVERS[:2])
    turns = [turn for turn in wanted(SERVERS, store, 2) if turn.cell == CELLS[0]]
    assert [turn.round for turn in turns] == [2, 3]
    for turn in turns:
        take(turn, store)
    assert CELLS[0] not in {turn.cell for turn in wanted(SERVERS, store, 2)}
    more = [*SERVERS, SERVERS[0]._replace(mode=tree(32))]
    assert [turn.round for turn in wanted(more, store, 2) if turn.cell == CELLS[0]] == [4, 5]


def test_a_round_with_a_failure_does_not_count(store):
    take(Turn(1, CELLS[0]), store)
    take(Turn(1, CELLS[0]), store, SERVERS[:1], failed="steps ran outside CUDA graphs")
    assert [turn.round for turn in wanted(SERVERS, store, 1) if turn.cell == CELLS[0]] == [2]


@pytest.mark.parametrize("other", [{"build": "b"}, {"card": "c"}, {"draft_backend": "triton"}])
def test_another_server_is_another_measurement(store, other):
    for turn in wanted(SERVERS, store, 1):
        take(turn, store)
    assert not wanted(SERVERS, store, 1)
    assert len(wanted([*SERVERS[:2], SERVERS[2]._replace(**other)], store, 1)) == len(CELLS)
