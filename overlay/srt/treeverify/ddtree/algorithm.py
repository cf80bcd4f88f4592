# SPDX-License-Identifier: Apache-2.0
"""`--speculative-algorithm DDTREE`: registered with SGLang, and its server arguments checked and completed.

DDTREE is DFLASH with a tree in place of the chain (arXiv 2604.12989): one pass of a DFlash drafter gives a distribution
for each of B - 1 positions, the most likely prefixes under their product become a tree of n - 1 nodes below the bonus
token, and one pass of the target verifies them all.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ..compat import SPEC_V2, choose_draft_backend, resolved

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

NAME = "DDTREE"

BACKENDS = ("flashinfer", "triton")
"""Attention backends that verify a tree by its mask: FlashInfer (MLA with treeverify's kernels) and Triton."""

PAGE_SIZES = (1, 16, 32, 64)
"""Tokens of a KV page."""

DEFAULT_WIDTH = 16
"""Draft tokens, the bonus token among them, where the user names none; a block's where that is longer."""

MAX_RUNNING = 48
"""Requests at a time where the user sets no limit, as for DFLASH."""


class DDTreeAlgorithm(CustomSpecAlgo):
    """What SGLang asks about the algorithm. It drafts as DFLASH does, so it answers as DFLASH does."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens of a request in a pass: the drafter's is over a block, whatever the trees' size."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.server_args import get_global_server_args

        return int(get_global_server_args().speculative_dflash_block_size)

    def __getattr__(self, name: str) -> Any:
        """Questions that SGLang asks of built-in algorithms only."""
        if name.startswith("_"):
            raise AttributeError(name)
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        return getattr(SpeculativeAlgorithm.DFLASH, name)


def register(algorithms: Any) -> None:
    """Makes DDTREE known to SpeculativeAlgorithm, which is given: its own module calls this."""

    register = algorithms.register(
        NAME, supports_overlap=SPEC_V2, validate_server_args=complete, spec_class=DDTreeAlgorithm
    )
    register(_worker)


def _worker(server_args: ServerArgs) -> type:
    from .worker import DDTreeWorker

    return DDTreeWorker


def is_served() -> bool:
    """Whether this process serves with DDTREE."""
    from sglang.srt.server_args import get_global_server_args

    return bool(get_global_server_args().speculative_algorithm == NAME)


def turned_away(req: Req) -> str | None:
    """Why a request that DFLASH would take cannot be served, None where it can.

    DFLASH of spec v2 ignores what is named here; so the state that it needs is not kept.
    """
    if not is_served():
        return None
    asked, how = req.sampling_params, "DDTREE of this release does not support {}; drop it from the request."
    for name, off in (
        ("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0), ("min_new_tokens", 0),
    ):  # fmt: skip
        if getattr(asked, name) != off:
            return how.format(name)
    return None


def complete(args: ServerArgs) -> None:
    """Checks the arguments of a DDTREE server and fills in what was left out, in place.

    Raises:
        ValueError: arguments that do not go together; the message says which and what to pass instead.
    """
    _refuse(resolved(args))
    block = args.speculative_dflash_block_size = _block_size(args)
    width = args.speculative_num_draft_tokens = _width(args, block)
    window = args.speculative_draft_window_size
    if window is not None and int(window) < block:
        raise ValueError(
            f"{NAME}: --speculative-draft-window-size {window} is shorter than the drafter's block of {block} tokens; "
            f"pass at least {block}, or drop it."
        )
    # SGLang's accounting reads these two; they mean nothing to a drafter without steps.
    args.speculative_num_steps = args.speculative_eagle_topk = 1
    args.enable_mixed_chunk = False
    if not SPEC_V2:
        args.disable_overlap_schedule = True
    choose_draft_backend(args)
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING
    logger.info(
        "%s: trees of %d tokens (budget %d) from blocks of %d; at most %d requests at a time; mixed chunked prefill is "
        "off%s.", NAME, width, width - 1, block, args.max_running_requests,
        ", and so is overlap scheduling" if args.disable_overlap_schedule else "",
    )  # fmt: skip


def _refuse(args: ServerArgs) -> None:
    """Raises ValueError for what DDTREE cannot serve."""
    from ..gates import switched_on, verifying_backend
    from ..kv.upkeep import DEFRAG
    from .budget.widths import ADAPT

    backend = verifying_backend(args)
    wrong = {
        "needs a drafter: pass --speculative-draft-model-path": args.speculative_draft_model_path is None,
        "does not support data-parallel attention: drop --enable-dp-attention": args.enable_dp_attention,
        "does not support pipeline parallelism: pass --pp-size 1": args.pp_size != 1,
        "does not support two-batch overlap: drop --enable-two-batch-overlap": args.enable_two_batch_overlap,
        "does not support PD multiplexing: drop --enable-pdmux": args.enable_pdmux,
        "does not support prefill-decode disaggregation, which hands no draft KV over: drop --disaggregation-mode": (
            args.disaggregation_mode != "null"
        ),
        f"serves page sizes {', '.join(map(str, PAGE_SIZES))}, got {args.page_size}: pass --page-size 1, or another "
        "of these": args.page_size not in (None, *PAGE_SIZES),
        f"would have its tree mask ignored by the {backend} attention backend: pass --attention-backend "
        + " or ".join(BACKENDS): backend not in (None, *BACKENDS),
        "has no window of the drafter's KV in this release: drop --speculative-draft-window-size": (
            SPEC_V2 and args.speculative_draft_window_size is not None
        ),
        "has no trtllm_mha drafter in this release: pass --speculative-draft-attention-backend flashinfer": (
            SPEC_V2 and args.speculative_draft_attention_backend == "trtllm_mha"
        ),
        f"does not adapt its trees in this release: unset {ADAPT}": SPEC_V2 and switched_on(ADAPT),
        f"does not move running requests' slots in this release: unset {DEFRAG}": SPEC_V2 and switched_on(DEFRAG),
        f"needs CUDA graphs to adapt its trees: drop --disable-cuda-graph, or unset {ADAPT}": (
            switched_on(ADAPT) and args.disable_cuda_graph
        ),
        "accepts what the target itself samples, there is no threshold: drop --speculative-accept-threshold-*": (
            args.speculative_accept_threshold_single != 1.0 or args.speculative_accept_threshold_acc != 1.0
        ),
        f"has no EAGLE steps or topk (got {args.speculative_num_steps}, {args.speculative_eagle_topk}): drop "
        "--speculative-num-steps and --speculative-eagle-topk": (
            args.speculative_num_steps not in (None, 1) or args.speculative_eagle_topk not in (None, 1)
        ),
    }  # fmt: skip
    for problem, found in wrong.items():
        if found:
            raise ValueError(f"{NAME} {problem}.")


def _width(args: ServerArgs, block: int) -> int:
    width = args.speculative_num_draft_tokens
    if width is None:
        return max(DEFAULT_WIDTH, block)
    from ..attention.plan import MAX_Q

    if width < 2:
        raise ValueError(
            f"{NAME}: --speculative-num-draft-tokens {width} leaves a budget of {width - 1} draft tokens, as it "
            f"counts the bonus token too; pass {block} or more."
        )
    if width < block:
        raise ValueError(
            f"{NAME}: --speculative-num-draft-tokens {width} is less than the drafter's block of {block} tokens, for "
            f"which SGLang reserves no slots then; pass at least {block} (budget {block - 1})."
        )
    if width > MAX_Q:
        raise ValueError(f"{NAME}: --speculative-num-draft-tokens {width} is more than {MAX_Q}.")
    return int(width)


def _block_size(args: ServerArgs) -> int:
    """Tokens of the drafter's block, the bonus token among them: the drafter's own, which the user may repeat."""
    given = args.speculative_dflash_block_size
    try:
        own = _drafter_block_size(args)
    except Exception as e:  # whatever the loaders of a model config raise
        if given is None:
            raise ValueError(
                f"{NAME}: the config of the drafter {args.speculative_draft_model_path} cannot be read for its block "
                f"size ({e}); mend the path, or pass --speculative-dflash-block-size."
            ) from e
        own = None
    if given is None and own is None:
        raise ValueError(
            f"{NAME}: the drafter {args.speculative_draft_model_path} names no block_size in its config; pass "
            "--speculative-dflash-block-size."
        )
    block = int(own if given is None else given)  # type: ignore[arg-type]
    if own is not None and block != own:
        raise ValueError(
            f"{NAME}: --speculative-dflash-block-size {block} is not the drafter's {own}; pass {own}, or drop it."
        )
    if block < 2:
        raise ValueError(f"{NAME}: a block of {block} tokens drafts nothing; --speculative-dflash-block-size is >= 2.")
    return block


def _drafter_block_size(args: ServerArgs) -> int | None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    return parse_dflash_draft_config(draft_hf_config=config).block_size  # type: ignore[no-any-return]
