# SPDX-License-Identifier: Apache-2.0
"""Slots and rows of SGLang's pools through random lives of requests (tests/support/kv_model.py), and defrag alone.

More steps: TREEVERIFY_KV_STEPS=100000.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from worker import Worker

STEPS = int(os.environ.get("TREEVERIFY_KV_STEPS", "300"))
INTERPRETED = 24
"""Steps on SGLang's own Triton kernels, interpreted: a hundred times as slow."""


def lives(steps: int, seed: int, interpret: bool) -> dict[str, int]:
    from kv_model import run

    return run(steps, seed, interpret)


def test_no_page_is_lost_or_held_twice_and_every_row_is_right(patched: Worker) -> None:
    taken = patched(lives, steps=STEPS, seed=0, interpret=False)
    assert taken["checks"] >= STEPS
    assert all(taken[name] > 0 for name in ("start", "step", "finish", "defrag", "evict")), taken


def test_so_it_is_with_sglangs_own_kernels(patched: Worker) -> None:
    taken = patched(lives, steps=INTERPRETED, seed=1, interpret=True)
    assert taken["checks"] >= INTERPRETED and taken["step"] > 0 and taken["start"] > 0


def defragged(page_size: int) -> dict[str, Any]:
    """A request of scattered pages, by defrag alone: with no room, with room, once more, and in mid-step."""
    import torch
    from kv_model import World
    from sglang.srt.treeverify.kv.defrag import defrag, pieces_of

    world = World(page_size, 2000 // page_size, 0, need_sort=True, radix=True, window=False)
    free = world.allocator.free_pages
    world.allocator.free_pages = torch.cat([free[0::2], free[1::2]])  # every other page, then the rest
    world.start()
    [req] = world.batch.reqs
    while len(world.texts[req.rid]) < 4 * page_size + 30:
        world.step()
    row, begin = world.requests.req_to_token[req.req_pool_idx], req.cache_protected_len
    everything = (world.requests.req_to_token, world.allocator, world.both)

    def own() -> torch.Tensor:
        return row[begin : req.kv_committed_len].clone()

    scattered, found = own(), {"protected": begin % page_size, "pieces": pieces_of(own())}
    # Every other free page is taken away: no two that are left are neighbours.
    hole = torch.cat([world.allocator.free_pages, world.allocator.release_pages]).sort().values
    taken = hole[1::2]
    world.allocator.free_pages, world.allocator.release_pages = hole[0::2], hole[:0]
    found["without a run"] = defrag(req, *everything) is None and torch.equal(own(), scattered)
    world.allocator.free_pages = torch.cat([world.allocator.free_pages, taken])
    prefix = row[:begin].clone()
    moved = defrag(req, *everything)
    found["moved"] = moved is not None and moved.tokens == len(scattered) and moved.pieces == found["pieces"]
    found["prefix"] = torch.equal(prefix, row[:begin])
    found["together"] = pieces_of(own())
    found["twice"] = defrag(req, *everything) is None
    world.check([req])
    req.kv_allocated_len += 1
    try:
        defrag(req, *everything)
    except ValueError as e:
        found["in mid-step"] = str(e)
    return found


def test_defrag_moves_what_the_request_alone_holds(patched: Worker) -> None:
    for page_size in (1, 16):
        found = patched(defragged, page_size=page_size)
        assert found.pop("pieces") > 1 and "between two steps" in found.pop("in mid-step")
        assert found.pop("together") == 1 and found.pop("protected") == 0
        assert all(found.values()), found


def kept_up(page_size: int) -> dict[str, Any]:
    """What Upkeep does for requests on scattered pages, by one policy after another; and over a life of steps."""
    import torch
    from kv_model import World
    from sglang.srt.treeverify.kv.defrag import pieces_of
    from sglang.srt.treeverify.kv.upkeep import Policy, Upkeep

    world = World(page_size, 4000 // page_size, 0, need_sort=True, radix=False, window=False)
    free = world.allocator.free_pages
    world.allocator.free_pages = torch.cat([free[0::2], free[1::2]])
    world.start()
    world.start()
    while min(len(text) for text in world.texts.values()) < 4 * page_size + 30:
        world.step()
    reqs = world.batch.reqs
    longest = max(reqs, key=lambda req: req.kv_committed_len)
    own, left = longest.kv_committed_len, longest.sampling_params.max_new_tokens - len(longest.output_ids)
    wanted = Policy(tokens=own, left=left, run=own, steps=3)

    def pieces() -> list[int]:
        rows = world.requests.req_to_token
        return [pieces_of(rows[req.req_pool_idx, : req.kv_committed_len]) for req in reqs]

    def upkeep(policy: Policy) -> Upkeep:
        return Upkeep(world.requests.req_to_token, world.allocator, world.both, policy)

    def looks(policy: Policy) -> list[bool]:
        mine = upkeep(policy)
        return [mine(reqs) is not None for _ in range(policy.steps)]

    before = pieces()
    declined = {
        "too short": looks(replace(wanted, tokens=own + 1)), "ends soon": looks(replace(wanted, left=left + 1)),
        "few pieces": looks(replace(wanted, run=0)),
    }  # fmt: skip
    untouched = pieces() == before
    moved = looks(wanted)
    after = dict(zip((req is longest for req in reqs), pieces(), strict=True))
    world.check(reqs)
    always, count = upkeep(Policy(tokens=2, left=1, run=1 << 20, steps=2)), 0
    for _ in range(40):
        world.step()
        count += always(world.batch.reqs) is not None
        world.check(world.batch.reqs)
    return {
        "before": min(before), "declined": any(any(each) for each in declined.values()), "untouched": untouched,
        "moved": moved, "longest": after[True], "other": after[False] == before[1 - reqs.index(longest)],
        "in a life": count,
    }  # fmt: skip


def test_upkeep_moves_what_its_policy_says(patched: Worker) -> None:
    for page_size in (1, 16):
        found = patched(kept_up, page_size=page_size)
        assert found["before"] > 1 and not found["declined"] and found["untouched"]
        assert found["moved"] == [False, False, True] and found["longest"] == 1 and found["other"]
        assert found["in a life"] >= 2
