# SPDX-License-Identifier: Apache-2.0
"""From the chunks of an engine's answers to rows: tokens a step, step time, and which rows are still wanted."""

from __future__ import annotations

import ast
import itertools
import json
from typing import Any

import pytest
from bench.ddtree import acceptance, believed, models, speed
from bench.ddtree.acceptance import accepted_each_step, ratio, summarize
from bench.ddtree.answers import Answer, collect
from bench.ddtree.modes import CHAIN, NONE, Mode, accepting, adaptive, engine_arguments, timed, tree
from bench.ddtree.rows import KEY, Server, digest
from bench.ddtree.worker import failure
from bench.store import Store


def chunk(index: int, tokens: int, **more: int) -> dict[str, Any]:
    return {"index": index, "meta_info": {"completion_tokens": tokens, **more}}


def answer(*tokens: int, steps: int | None = None) -> Answer:
    return Answer([0.1 * i for i in range(len(tokens))], list(tokens), {"spec_verify_ct": steps} if steps else {})


def test_interleaved_chunks_go_to_their_requests():
    chunks = [chunk(1, 1), chunk(0, 1), chunk(1, 4), chunk(0, 3, spec_verify_ct=2), chunk(1, 9, spec_verify_ct=3)]
    first, second = collect(chunks, 2, itertools.count().__next__)
    assert (first.tokens, first.seconds, first.new, first.steps) == ([1, 3], [1, 3], 2, 2)
    assert (second.tokens, second.seconds, second.new, second.steps) == ([1, 4, 9], [0, 2, 4], 8, 3)


def test_without_speculation_a_token_is_a_step():
    assert answer(1, 97).steps == 96


def test_tokens_of_the_prefill_are_not_a_steps():
    row = summarize([answer(1, 4, 5, 13, steps=3), answer(1, 2, 3, steps=2)], 2)
    assert row["tokens"] == [12, 2] and row["steps"] == [3, 2]
    assert row["tokens_per_step"] == pytest.approx(14 / 5)
    assert row["reached"] == [0.4, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2] and row["seen"] == 1


def test_steps_that_came_as_one_chunk_are_not_taken_for_one_step():
    assert accepted_each_step(answer(1, 4, 5, steps=2)) == [2, 0]
    assert accepted_each_step(answer(1, 5, steps=2)) is None
    row = summarize([answer(1, 4, 5, steps=2), answer(1, 9, steps=3)], 2)
    assert row["seen"] == 0.5 and row["reached"] == [0.5, 0.5] and row["tokens"] == [4, 8]


def test_repeated_answers_add_up_by_prompt():
    row = summarize([answer(1, 3, steps=1), answer(1, 2, steps=1), answer(1, 5, steps=2), answer(1, 2, steps=1)], 2)
    assert row["tokens"] == [6, 2] and row["steps"] == [3, 2]


def test_the_ratio_of_a_row_to_itself_is_one_without_error():
    row = {"tokens": [10, 20, 30], "steps": [5, 6, 7]}
    assert ratio(row, row) == (1.0, 0.0)
    over, error = ratio({"tokens": [20, 24, 30], "steps": [5, 6, 7]}, row)
    assert over == pytest.approx(74 / 60) and 0.05 < error < 0.4


def test_a_step_is_timed_while_all_requests_decode():
    early = Answer([0.0, 5.0], [1, 97], {"spec_verify_ct": 90})
    late = Answer([1.0, 5.2], [1, 97], {"spec_verify_ct": 84})
    assert speed.step_ms([early, late]) == pytest.approx(50.0)


def test_prompts_are_the_same_for_every_server_and_differ_among_requests():
    assert speed.prompt(50, 1) == speed.prompt(50, 1) != speed.prompt(50, 2)
    assert len(speed.prompt(1024, 0)) == 1024


@pytest.fixture
def server() -> Server:
    return Server("speed", tree(16), "flashinfer", "a card", "a build")


def test_both_temperatures_are_wanted_of_acceptance_until_they_are_there(tmp_path, server):
    ours, report = server._replace(stage="acceptance"), tmp_path / "r.json"
    every = list(ours.wanted(Store(report, KEY)))
    assert [temperature for _, temperature in every] == [0.0, 1.0]
    Store(report, KEY).add({**every[0][0], "tokens_per_step": 2.0})
    Store(report, KEY).add({**every[1][0], "failed": "NaN"})
    assert list(ours.wanted(Store(report, KEY))) == every[1:]


def test_the_log_tells_what_is_not_what_was_meant(server):
    good = {"graph": True, "recomputed": 1}
    assert failure(server, good, "all well") == {}
    assert "CUDA graphs" in failure(server, good | {"graph": False}, "")["failed"]
    assert "pool is too small" in failure(server, good | {"recomputed": 1024}, "")["failed"]
    chain = server._replace(stage="acceptance", mode=CHAIN)
    warning = "DFLASH non-greedy verification is unavailable; falling back to greedy argmax verification."
    assert "greedily" in failure(chain, {}, warning)["failed"]
    assert "NaN" in failure(server, good, "the drafter's log-probabilities hold NaN for r1;")["failed"]


def test_the_digest_sees_sources_and_library_only(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("2")
    assert digest(tmp_path) == before
    (tmp_path / "lib.so").write_text("3")
    assert digest(tmp_path) != before


def test_servers_and_their_arguments(tmp_path):
    assert timed([32, 16]) == [NONE, CHAIN, tree(16), tree(32)] and NONE not in accepting([16, 32])
    plain = engine_arguments(NONE, tmp_path, tmp_path, "triton", 1)
    assert not [name for name in plain if name.startswith("speculative")]
    assert engine_arguments(tree(32), tmp_path, tmp_path, "triton", 1)["speculative_num_draft_tokens"] == 32


def test_an_adaptive_server_is_measured_beside_all_its_widths(tmp_path):
    assert adaptive([16, 32, 64, 8]) == [Mode("adaptive", 64)] == timed([16, 32, 64, 8])[-1:]
    assert adaptive([16, 32]) == adaptive([8]) == [] and not any(mode.adapts for mode in accepting([16, 8]))
    arguments = engine_arguments(Mode("adaptive", 64), tmp_path, tmp_path, "triton", 1)
    assert (arguments["speculative_algorithm"], arguments["speculative_num_draft_tokens"]) == ("DDTREE", 64)


def test_it_is_told_the_acceptance_of_the_trained_drafter(server):
    ours = server._replace(mode=Mode("adaptive", 16))
    row = {"stage": "acceptance", "mode": "ddtree", "temperature": 0.0, "card": "a card", "build": "a build"}
    rows = [{**row, "n": 8, "tokens_per_step": 2.5}, {**row, "n": 16, "tokens_per_step": 3.0}]
    other = [{**rows[1], "temperature": 1.0}, {**rows[1], "build": "b"}, {**rows[1], "failed": "NaN"}]
    assert believed.environment(ours, [*other, *rows]) == {
        "TREEVERIFY_DDTREE_ADAPT": "1", "TREEVERIFY_DDTREE_ADAPT_TOKENS_FOR_TEST": "8:2.5,16:3.0"}  # fmt: skip
    assert believed.environment(ours, [rows[0], *other]) is None
    assert believed.environment(server, []) == {}


def test_arguments_are_those_of_the_release(stock_tree, tmp_path):
    """Names only: the release's ServerArgs is read, not imported."""
    source = (stock_tree / "sglang" / "srt" / "server_args.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    known = {ast.unparse(node.target) for node in classes["ServerArgs"].body if isinstance(node, ast.AnnAssign)}
    given = engine_arguments(tree(16), tmp_path, tmp_path, "triton", 1) | acceptance.SERVER | speed.SERVER
    assert given.keys() <= known


def test_random_weight_configs_are_read_by_transformers(tmp_path):
    auto = pytest.importorskip("transformers").AutoConfig
    target, draft = (auto.from_pretrained(folder) for folder in models.write(tmp_path))
    assert (target.kv_lora_rank, target.qk_rope_head_dim, target.num_attention_heads) == (512, 64, 8)
    assert target.hidden_size == draft.hidden_size and target.vocab_size == draft.vocab_size
    assert max(json.loads(json.dumps(draft.dflash_config))["target_layer_ids"]) < target.num_hidden_layers
    assert draft.block_size == CHAIN.width and max(speed.CONTEXTS) < target.max_position_embeddings
