# SPDX-License-Identifier: Apache-2.0
"""What the DDTREE stages conclude from servers' outputs, and the tiny grouped-query model. No GPU, no SGLang."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

import churn
import lossless
import modes
import sampling
import side_by_side
import tiny_gqa
from kit import checkpoint


def outputs(*rows: tuple[list[int], int]) -> dict[str, Any]:
    return {"rows": [{"output": output, "steps": steps} for output, steps in rows], "seconds": {}}


EQUAL, CHAIN, CONTROL = (
    lossless.Pair("a", "b"),
    lossless.Pair("a", "b", steps=True),
    lossless.Pair("a", "b", equal=False),
)


def test_equal_outputs_pass_and_fail_the_control() -> None:
    ours, theirs = outputs(([1, 2, 3, 4], 2), ([5, 6, 7, 8], 1)), outputs(([1, 2, 3, 4], 3), ([5, 6, 7, 8], 3))
    assert lossless.compare(EQUAL, ours, theirs)["ok"]
    assert not lossless.compare(CONTROL, ours, theirs)["ok"]
    assert not lossless.compare(CHAIN, ours, theirs)["ok"]
    assert lossless.compare(CHAIN, ours, ours)["ok"]


def test_one_other_token_fails() -> None:
    ours, theirs = outputs(([1, 2, 3, 4], 2), ([5, 6, 9, 8], 1)), outputs(([1, 2, 3, 4], 3), ([5, 6, 7, 8], 3))
    row = lossless.compare(EQUAL, ours, theirs)
    assert (row["ok"], row["equal"], row["first_differences"]) == (False, 1, [2])
    assert lossless.compare(CONTROL, ours, theirs)["ok"]


def test_equality_without_accepted_drafts_shows_nothing() -> None:
    ours = outputs(([1, 2, 3, 4], 3))
    assert not lossless.compare(EQUAL, ours, ours)["ok"]


def test_every_proof_names_servers_that_exist() -> None:
    assert {name for pair in lossless.PAIRS for name in (pair.server, pair.like)} | set(lossless.FORCED) == set(
        lossless.SERVERS
    )
    assert set(sampling.RIGHT) < set(sampling.SERVERS) and set(churn.OURS) < set(churn.SERVERS)


def test_sampled_draws_are_judged_both_ways() -> None:
    cells = [[[0, -1], [0.5, 0.9]], [[-1], [0.5, 0.1]]]
    expected = [{"cells": cells, "rounding": 0.0}]

    def data(firsts: int, steps: float) -> dict[str, Any]:
        draws = [[0, 1, 1, 1]] * firsts + [[1, 1, 1, 1]] * (1000 - firsts)
        return {"rules": {"plain": {"draws": [draws], "steps": steps}}, "seconds": {}}

    assert [row["ok"] for row in sampling.judge("mla_tree", "plain", data(510, 1.5), expected)] == [True, True]
    assert [row["ok"] for row in sampling.judge("mla_tree", "plain", data(510, 3.0), expected)] == [False, True]
    assert [row["ok"] for row in sampling.judge("mla_tree", "plain", data(600, 1.5), expected)] == [False, True]
    assert [row["ok"] for row in sampling.judge("mla_dropped", "plain", data(600, 1.5), expected)] == [True]
    assert [row["ok"] for row in sampling.judge("mla_dropped", "plain", data(500, 1.5), expected)] == [False]


POOL = {"total": 10, "free": 6, "cached": 4, "each_once": True, "rows": 8, "rows_free": 8}


@pytest.mark.parametrize(
    "change", [{"free": 7}, {"each_once": False}, {"rows_free": 7}, {"free": 5}, {"cached": 5, "each_once": False}]
)
def test_a_pool_that_is_not_whole_fails(change: dict[str, Any]) -> None:
    assert churn.exact_pool(POOL)
    assert not churn.exact_pool({**POOL, **change})


def test_waves_are_judged() -> None:
    good = {"wave": "1 x", "wrong": 0, "broken": 0, "shown": True, "pool": POOL}
    free = {**POOL, "free": 10, "cached": 0, "batch_sizes": [1, 4, 7, 8]}

    def oks(name: str, **change: Any) -> list[bool]:
        data = {"waves": [{**good, **change}], "flushed": True, "after": free}
        return [row.get("ok") for row in churn.judge(name, data)]

    assert oks("float32") == oks("bf16") == [True, True]
    assert oks("float32", wrong=1) == oks("pages", wrong=1) == [False, True] and oks("bf16", wrong=1) == [True, True]
    assert oks("bf16", broken=1) == oks("bf16", shown=False) == [False, True]
    assert oks("dflash", broken=1) == [None, None]
    for after in ({**free, "free": 6, "cached": 4}, {**free, "batch_sizes": [1, 2, 4, 8]}):
        assert churn.judge("bf16", {"waves": [], "flushed": True, "after": after})[0]["ok"] is False


def test_only_drafting_algorithms_get_a_drafter(tmp_path: Path) -> None:
    with_draft = modes.engine_arguments(tmp_path, tmp_path / "draft", **modes.MODES["ddtree"].arguments)
    assert with_draft["speculative_draft_model_path"] == str(tmp_path / "draft")
    assert "speculative_draft_model_path" not in modes.engine_arguments(
        tmp_path, tmp_path, **modes.MODES["ngram"].arguments
    )


def test_modes_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TV_MODES", "ddtree ngram")
    assert list(modes.chosen()) == ["ddtree", "ngram"]
    monkeypatch.setenv("TV_MODES", "")
    assert modes.chosen() == modes.MODES
    monkeypatch.setenv("TV_MODES", "nothing")
    with pytest.raises(KeyError):
        modes.chosen()


def test_servers_run_side_by_side_and_resume(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import sys, pathlib\nname, work = sys.argv[2], pathlib.Path(sys.argv[4])\n"
        "assert name != 'bad', 'no such thing'\n(work / f'{name}.json').write_text(sys.argv[6])\n"
    )
    work = tmp_path / "work"
    assert side_by_side.run(str(script), ["a", "bad", "c"], work, [], 100, 60) == ["bad"]
    assert (side_by_side.load(work, "a"), side_by_side.load(work, "c")) == (100, 100 + 2 * side_by_side.PORTS)
    assert side_by_side.load(work, "bad") is None
    assert side_by_side.run(str(script), ["c"], work, [], 7, 60) == []
    assert side_by_side.load(work, "c") == 100 + 2 * side_by_side.PORTS  # not run again


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_gqa.write(tmp_path_factory.mktemp("gqa"))


def test_same_seed_same_weights(gqa: tuple[Path, Path], tmp_path: Path) -> None:
    again, other = tiny_gqa.write(tmp_path / "again"), tiny_gqa.write(tmp_path / "other", seed=1)
    for folder, same, differs in zip(gqa, again, other, strict=True):
        weights = [load_file(str(where / "model.safetensors")) for where in (folder, same, differs)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_drafter_fits_the_target(gqa: tuple[Path, Path]) -> None:
    target, draft = (json.loads((folder / "config.json").read_text()) for folder in gqa)
    for name in ("vocab_size", "hidden_size"):
        assert target[name] == draft[name]
    assert draft["num_target_layers"] == target["num_hidden_layers"] and draft["block_size"] == lossless.BLOCK
    assert checkpoint.load_drafter(gqa[1]).norm.weight[0].item() == pytest.approx(tiny_gqa.FLATNESS, rel=1e-2)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_greedy_text_is_varied_and_not_tied(gqa: tuple[Path, Path]) -> None:
    """By transformers' own Qwen3, in float32."""
    import cpu_sglang

    cpu_sglang.prepare()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gqa[0], dtype=torch.float32)
    fresh, cache, texts, gaps = torch.tensor(tiny_gqa.prompts((20,), 8)), None, [], []
    with torch.no_grad():
        for _ in range(60):
            out = model(fresh, past_key_values=cache, use_cache=True)
            best, fresh = out.logits[:, -1].topk(2)
            gaps.append((best[:, 0] - best[:, 1]).min().item())
            cache, fresh = out.past_key_values, fresh[:, :1]
            texts.append(fresh)
    written = torch.cat(texts, 1)
    assert min(gaps) > 1e-4  # float32 rounding decides nothing
    for row in written.tolist():
        assert len(set(zip(row, row[1:], strict=False))) >= 15  # different pairs of tokens
    assert len({tuple(row) for row in written.tolist()}) == len(written)
