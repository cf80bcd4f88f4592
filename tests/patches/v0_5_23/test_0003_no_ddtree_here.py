# SPDX-License-Identifier: Apache-2.0
"""0003: DDTREE is refused with what to do instead; other unknown names in SGLang's own words."""

from __future__ import annotations

from worker import Worker


def said_of(name: str) -> str:
    """What SGLang says of an algorithm of that name."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        return str(SpeculativeAlgorithm.from_string(name))
    except ValueError as error:
        return str(error)


def test_ddtree_is_refused_with_a_way_out(patched: Worker, stock: Worker) -> None:
    said, before = patched(said_of, name="ddtree"), "Unknown speculative algorithm name: ddtree"
    assert stock(said_of, name="ddtree") == before
    assert said.startswith(before) and "no DDTREE on SGLang v0.5.23 yet" in said and "DFLASH" in said, said


def test_other_names_are_sglangs_business(patched: Worker, stock: Worker) -> None:
    for name in ("DDTREES", "EAGLE3", "nextn"):
        assert patched(said_of, name=name) == stock(said_of, name=name)
