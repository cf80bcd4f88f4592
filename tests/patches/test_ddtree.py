# SPDX-License-Identifier: Apache-2.0
"""0004: DDTREE is registered, and checks its arguments, the target's layers and the backend that verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worker import Worker

pytestmark = pytest.mark.ddtree

DRAFTER = str(Path(__file__).resolve().parents[1] / "data" / "tiny_mla" / "draft")  # its block size is 8


def questions() -> dict[str, list[Any]]:
    """Every question of a built-in algorithm, answered by DDTREE and by DFLASH."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours, dflash = SpeculativeAlgorithm.from_string("ddtree"), SpeculativeAlgorithm.DFLASH
    names = [name for name in dir(SpeculativeAlgorithm) if name.startswith(("is_", "supports_"))]
    names += [name for name in dir(dflash) if name.startswith(("is_", "supports_"))]
    return {name: [getattr(ours, name)(), getattr(dflash, name)()] for name in names}


def test_every_question_is_answered_as_dflash_answers_it(patched: Worker) -> None:
    answers = patched(questions)
    assert len(answers) >= 8
    assert all(ours == dflash for ours, dflash in answers.values()), answers


def from_stock() -> str:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        return repr(SpeculativeAlgorithm.from_string("DDTREE"))
    except ValueError as e:
        return str(e)


def test_stock_sglang_does_not_know_it(stock: Worker) -> None:
    assert "Unknown" in stock(from_stock)


def completed(**changes: Any) -> dict[str, Any] | str:
    """The speculative arguments after ServerArgs' own checks of them, or what was refused."""
    import releases
    from mla_rig import server_args

    args = server_args(speculative_algorithm="DDTREE", **changes)
    try:
        releases.imported().complete_speculative(args)
    except ValueError as e:
        return str(e)
    names = ("num_draft_tokens", "dflash_block_size", "num_steps", "eagle_topk")
    found = {name: getattr(args, f"speculative_{name}") for name in names}
    return {**found, "overlap": not args.disable_overlap_schedule, "running": args.max_running_requests}


def overlaps() -> bool:
    """Whether this release's DFLASH runs under overlap scheduling."""
    from sglang.srt.treeverify.compat import SPEC_V2

    return SPEC_V2


@pytest.mark.parametrize(
    "given, width",
    [
        ({}, 16),
        ({"speculative_num_draft_tokens": 64}, 64),
        ({"speculative_dflash_block_size": 8}, 16),
        *(({"page_size": page}, 16) for page in (16, 32, 64)),
    ],
)
def test_what_is_left_out_is_filled_in(patched: Worker, given: dict[str, Any], width: int) -> None:
    found = patched(completed, speculative_draft_model_path=DRAFTER, **given)
    assert found == {
        "num_draft_tokens": width, "dflash_block_size": 8, "num_steps": 1, "eagle_topk": 1,
        "overlap": patched(overlaps), "running": 48,
    }  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
    ({"speculative_num_draft_tokens": 1}, "budget of 0"),
    ({"speculative_num_draft_tokens": 7}, "block of 8"),
    ({"speculative_num_draft_tokens": 257}, "256"),
    ({"speculative_dflash_block_size": 16}, "not the drafter's 8"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"pp_size": 2}, "--pp-size 1"),
    ({"page_size": 128}, "--page-size 1"),
    ({"page_size": 8}, "page sizes 1, 16, 32, 64, got 8"),
    ({"attention_backend": "fa3"}, "flashinfer or triton"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"speculative_num_steps": 3}, "--speculative-num-steps"),
    ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
    ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold"),
    ({"speculative_draft_window_size": 4}, "--speculative-draft-window-size"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
]


@pytest.mark.parametrize("given, told", REFUSED, ids=lambda value: "" if isinstance(value, str) else [*value][0])
def test_wrong_arguments_are_refused_with_the_way_out(patched: Worker, given: dict[str, Any], told: str) -> None:
    found = patched(completed, **{"speculative_draft_model_path": DRAFTER, **given})
    assert isinstance(found, str) and found.startswith("DDTREE") and told in found, found


def dflash_arguments() -> dict[str, Any] | str:
    import releases
    from mla_rig import server_args

    path = str(Path(__file__).resolve().parents[1] / "data" / "tiny_mla" / "draft")
    args = server_args(speculative_algorithm="DFLASH", speculative_draft_model_path=path)
    releases.imported().complete_speculative(args)
    return {k: v for k, v in vars(args).items() if k.startswith("speculative") and not k.endswith("path")}


def test_dflash_stays_as_it_was(patched: Worker, stock: Worker) -> None:
    assert patched(dflash_arguments) == stock(dflash_arguments)


def v2_refused(**changes: Any) -> dict[str, Any] | str:
    import os
    from unittest import mock

    environment = changes.pop("environment", {})
    with mock.patch.dict(os.environ, environment):
        return completed(speculative_draft_model_path=DRAFTER, **changes)


@pytest.mark.pin("v0.5.17")
@pytest.mark.parametrize(
    "given, told",
    [
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size"),
        ({"environment": {"TREEVERIFY_DDTREE_ADAPT": "1"}}, "TREEVERIFY_DDTREE_ADAPT"),
        ({"environment": {"TREEVERIFY_DEFRAG": "1"}}, "TREEVERIFY_DEFRAG"),
        ({"speculative_draft_attention_backend": "trtllm_mha"}, "--speculative-draft-attention-backend"),
    ],
    ids=["window", "adapt", "defrag", "drafter"],
)
def test_what_spec_v2_does_not_have_yet_is_refused(patched: Worker, given: dict[str, Any], told: str) -> None:
    found = patched(v2_refused, **given)
    assert isinstance(found, str) and told in found and "release" in found


def turned_away(algorithm: str, **parameters: Any) -> str | None:
    """What the scheduler answers to a request."""
    from absent_kernels import absent

    absent()
    from types import SimpleNamespace

    from mla_rig import server_args
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.dflash_utils import validate_dflash_request

    server_args(speculative_algorithm=algorithm)
    req = SimpleNamespace(
        return_logprob=False, return_hidden_states=False, sampling_params=SamplingParams(**parameters)
    )
    return validate_dflash_request(req, True)


@pytest.mark.pin("v0.5.17")
def test_what_spec_v2_would_ignore_is_turned_away(patched: Worker) -> None:
    for parameters in (
        {"frequency_penalty": 0.5}, {"presence_penalty": -1.0}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3},
    ):  # fmt: skip
        [name] = parameters
        assert name in (patched(turned_away, algorithm="DDTREE", **parameters) or ""), parameters
        assert patched(turned_away, algorithm="DFLASH", **parameters) is None, "DFLASH stays as it is"
    assert patched(turned_away, algorithm="DDTREE", temperature=0.7, top_p=0.9, logit_bias={"3": 1.0}) is None


def widths() -> dict[str, list[int]]:
    """Tokens of a request in a pass of target and drafter, whatever arguments the asker has at hand."""
    from mla_rig import server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    server_args(speculative_algorithm="DDTREE", speculative_num_draft_tokens=32, speculative_dflash_block_size=8)
    asked = SpeculativeAlgorithm.from_string("DDTREE").get_num_tokens_per_req_for_target_verify
    return {"target": [asked(32, False)], "drafter": [asked(32, True), asked(8, True)]}


def test_the_drafter_passes_over_blocks_where_the_target_passes_over_trees(patched: Worker) -> None:
    assert patched(widths) == {"target": [32], "drafter": [8, 8]}


def refusals() -> dict[str, Any]:
    """What is said of kinds of layers."""
    import releases
    from sglang.srt.treeverify.ddtree.layers import refuse_layers
    from sglang.srt.treeverify.gates import TreeRefused

    def told(recurrent: bool = False, window: int | None = None) -> str:
        try:
            return str(refuse_layers(releases.imported().model_runner(recurrent, window)))
        except TreeRefused as e:
            return str(e)

    return {"plain": told(), "mamba": told(recurrent=True), "window": told(window=128)}


def test_layers_that_take_rows_for_positions_are_refused(patched: Worker) -> None:
    found = patched(refusals)
    assert found["plain"] == "None"
    assert "recurrent" in found["mamba"] and "sliding-window" in found["window"]


def attached(backend: str) -> str:
    """How the real backend takes a tree's mask, or that it is refused."""
    from mla_rig import Rig
    from sglang.srt.treeverify.ddtree.masks import form_for
    from sglang.srt.treeverify.gates import TreeRefused

    if backend == "flashinfer_mla":
        return str(form_for(Rig(speculative_algorithm="DDTREE").backend()).name)
    named = type(backend, (), {})()
    try:
        return str(form_for(named).name)
    except TreeRefused as e:
        return str(e)


@pytest.mark.parametrize("backend, form", [("flashinfer_mla", "PACKED"), ("TritonAttnBackend", "FULL")])
def test_backends_that_honour_masks(patched: Worker, backend: str, form: str) -> None:
    assert patched(attached, backend=backend) == form


def test_backends_that_ignore_masks_are_refused(patched: Worker) -> None:
    assert "--attention-backend" in patched(attached, backend="FlashAttentionBackend")
