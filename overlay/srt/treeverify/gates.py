# SPDX-License-Identifier: Apache-2.0
"""Where treeverify serves TARGET_VERIFY, and what start-up refuses rather than compute it with a wrong mask."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import ranks
from .attention import abi, ops, paths
from .attention.plan import LATENT, MAX_HEADS, MAX_Q, ROPE

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DISABLE = "TREEVERIFY_DISABLE"
"""Set to 1: SGLang behaves as if it had no patches; a tree's mask is dropped again, which is logged."""

DROP_MASK = "TREEVERIFY_DROP_MASK_FOR_TEST"
"""Set to 1: our kernels verify every tree causally. Only for negative controls: outputs are wrong."""

PLAN = "TREEVERIFY_PLAN"
"""Set to 1: splits are shared out by the requests' lengths, every step; bits then depend on a request's neighbours."""

TRITON = "TREEVERIFY_TRITON"
"""Set to 0: TARGET_VERIFY on the Triton backend stays on SGLang's own kernels, which honour masks too."""

HONOURS_MASKS = frozenset({"triton"})
"""Backends whose own kernels honour a tree's mask: where treeverify does not serve them they carry on, trees or not."""

MOVES_KV = frozenset({"DDTREE"})
"""Algorithms whose trees are committed across pages: their worker moves the KV itself."""

CHAINS = frozenset({"DFLASH", "DSPARK", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "UNO"})
"""Algorithms that draft a chain at topk 1. Any other one, a plugin's too, is taken to draft trees."""

UNSERVED = {
    "DSPARK": "DSPARK may verify requests of different widths",
    "UNO": "UNO drafts with the target's own layers, in passes that look like verify steps",
}
"""Algorithms whose verify steps are SGLang's alone, and why."""


class TreeRefused(ValueError):
    """A draft tree was configured where nothing here can verify it by its mask."""


class Obstacle(NamedTuple):
    """Why treeverify does not serve, and what the user can do about it."""

    why: str
    way_out: str


def switched_on(name: str) -> bool:
    """Whether the environment variable `name` is set to something other than 0, false or nothing."""
    return os.environ.get(name, "").lower() not in ("", *_OFF)


def switched_off(name: str) -> bool:
    """Whether the environment variable `name` is set to 0 or false."""
    return os.environ.get(name, "").lower() in _OFF


_OFF = ("0", "false")


def drafts_trees(server_args: ServerArgs) -> bool:
    """Whether the configured algorithm can draft more than one child per token."""
    return server_args.speculative_algorithm not in CHAINS or (server_args.speculative_eagle_topk or 1) > 1


def verifying_backend(server_args: ServerArgs) -> str:
    """Name of the attention backend that runs TARGET_VERIFY, as HybridAttnBackend chooses it."""
    decodes = server_args.speculative_attention_mode == "decode"
    own = server_args.decode_attention_backend if decodes else server_args.prefill_attention_backend
    return own or server_args.attention_backend


def plans(server_args: ServerArgs) -> bool:
    """Whether splits are shared out by length; not under SGLang's deterministic mode, which one log line says."""
    if not switched_on(PLAN):
        return False
    if server_args.enable_deterministic_inference:
        _log_once(logging.WARNING, f"treeverify: {PLAN} has no effect with --enable-deterministic-inference.")
        return False
    return True


def serves(model_runner: ModelRunner, backend_name: str, device: torch.device) -> bool:
    """Whether treeverify takes over TARGET_VERIFY of this runner's `backend_name` backend.

    Raises:
        TreeRefused: trees are configured, this backend verifies them, and it cannot honour their mask.
    """
    from .compat import settings

    server_args = settings(model_runner)
    if server_args.speculative_algorithm is None or model_runner.is_draft_worker:
        return False
    if verifying_backend(server_args) != backend_name:
        return False
    trees = drafts_trees(server_args)
    if switched_on(DISABLE):
        dropped = trees and backend_name not in HONOURS_MASKS
        _log_once(logging.WARNING if dropped else logging.INFO, _disabled_note(backend_name, dropped))
        return False
    found = obstacle(model_runner, backend_name, device, trees)
    if found is None:
        _log_once(logging.INFO, _serving_note(backend_name, device, model_runner.kv_cache_dtype))
        if switched_on(DROP_MASK):
            _log_once(logging.ERROR, f"treeverify: {DROP_MASK} is set: tree masks are DROPPED, outputs are WRONG.")
        return True
    if trees and backend_name not in HONOURS_MASKS:
        raise TreeRefused(
            f"treeverify: a draft tree ({server_args.speculative_algorithm}) cannot be verified by its mask on the "
            f"{backend_name} MLA backend: {found.why}. {found.way_out}, or {_chain(server_args)}."
        )
    if backend_name == "flashinfer" or backend_name in HONOURS_MASKS:
        _log_once(logging.INFO, f"treeverify: TARGET_VERIFY stays on SGLang's own {backend_name} kernels: {found.why}.")
    return False


def _chain(server_args: ServerArgs) -> str:
    """How to draft without branches."""
    if server_args.speculative_algorithm == "NGRAM":
        return "take another algorithm: NGRAM drafts trees"
    if server_args.speculative_algorithm == "DDTREE":
        return "draft a chain (--speculative-algorithm DFLASH)"
    return "draft a chain (--speculative-eagle-topk 1)"


def obstacle(model_runner: ModelRunner, backend_name: str, device: torch.device, trees: bool) -> Obstacle | None:
    """The first thing that keeps treeverify from serving, None where it serves."""
    if backend_name == "triton":
        found = _triton_obstacle(model_runner)
        if found is not None:
            return found
    elif backend_name != "flashinfer":
        return Obstacle("it verifies causally", "Pass --attention-backend flashinfer (or triton)")
    from .compat import kv_ranks, settings

    args = settings(model_runner)
    width = args.speculative_num_draft_tokens
    if args.enable_two_batch_overlap or args.enable_pdmux:
        flag = "--enable-two-batch-overlap" if args.enable_two_batch_overlap else "--enable-pdmux"
        return Obstacle(f"{flag} splits a verify batch over streams", f"Drop {flag}")
    if args.speculative_algorithm in UNSERVED:
        return Obstacle(UNSERVED[args.speculative_algorithm], "Take another algorithm")
    if kv_ranks(args) > 1:
        return Obstacle("--dcp-size spreads a request's KV over GPUs", "Drop --dcp-size")
    if getattr(getattr(model_runner, "kv_index_translator", None), "is_translating", False):
        flag = "--enable-unified-memory"
        return Obstacle(f"{flag} gives KV slots other numbers in the pool", f"Drop {flag}")
    if trees and args.page_size != 1 and args.speculative_algorithm not in MOVES_KV:
        return Obstacle(
            f"page size {args.page_size}: accepting a path would move KV inside pages",
            "Pass --page-size 1",
        )
    if width is not None and width > MAX_Q:
        return Obstacle(
            f"{width} draft tokens are more than {MAX_Q}", f"Lower --speculative-num-draft-tokens to {MAX_Q}"
        )
    return _reading_obstacle(model_runner, device)


def _reading_obstacle(model_runner: ModelRunner, device: torch.device) -> Obstacle | None:
    """What keeps the kernels from reading this runner's pool, whatever for."""
    from .compat import attention_ranks

    config, dtype, kv_dtype = model_runner.model_config, model_runner.dtype, model_runner.kv_cache_dtype
    shape = (config.kv_lora_rank, config.qk_rope_head_dim)
    if shape != (LATENT, ROPE):
        return Obstacle(f"the kernels are built for latent {LATENT} and rope {ROPE}, the model has {shape}", _TRITON)
    heads = config.num_attention_heads // attention_ranks()
    if not 1 <= heads <= MAX_HEADS:
        return Obstacle(f"{heads} query heads a GPU are not within 1 .. {MAX_HEADS}", "Change --tp-size")
    if dtype not in (torch.bfloat16, torch.float16) or not paths.reads(dtype, kv_dtype):
        return Obstacle(
            f"the KV pool is {kv_dtype} and the model {dtype}; the kernels read bfloat16 or float16, the same for "
            "both, or float8_e4m3fn or float8_e5m2 under a bfloat16 model",
            "Pass --kv-cache-dtype auto with --dtype bfloat16",
        )
    return _kernel_obstacle(device, dtype, kv_dtype)


def reads_fp8(model_runner: ModelRunner, device: torch.device) -> bool:
    """Whether treeverify reads this runner's fp8 pool where SGLang's FlashInfer MLA backend would cast all of it."""
    from .compat import settings

    if model_runner.kv_cache_dtype not in paths.FP8 or switched_on(DISABLE):
        return False
    found = _reading_obstacle(model_runner, device)
    if found is None and settings(model_runner).enable_deterministic_inference:
        found = Obstacle("--enable-deterministic-inference: a request's splits follow its batch's size here", "")
    if found is None:
        _log_once(logging.INFO, f"treeverify: decode and cached prefixes read the {_kv(model_runner)} pool as it is.")
        return True
    whole = f"SGLang casts the whole {_kv(model_runner)} pool in every layer"
    _log_once(logging.INFO, f"treeverify: {whole}, for decode and cached prefixes: {found.why}.")
    return False


def _kv(model_runner: ModelRunner) -> str:
    return str(model_runner.kv_cache_dtype).removeprefix("torch.")


_TRITON = "Pass --attention-backend triton"


def _triton_obstacle(model_runner: ModelRunner) -> Obstacle | None:
    """What the Triton backend serves and treeverify does not."""
    from .compat import settings

    if not model_runner.use_mla_backend:
        return Obstacle("the model's attention is not MLA", "Serve an MLA model")
    if model_runner.sliding_window_size:
        return Obstacle("the model has sliding windows", "Serve a model without them")
    if settings(model_runner).enable_deterministic_inference:
        return Obstacle(
            "--enable-deterministic-inference: a request's splits follow its batch's size here",
            "Drop --enable-deterministic-inference",
        )
    return None


def _package() -> Path:
    """The sglang package this file was copied into."""
    return Path(__file__).resolve().parents[2]


def _kernel_obstacle(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Obstacle | None:
    """What keeps the kernels from running on this device, found by running them.

    The first thing that ranks may answer differently, so that here they compare what they have: a rank that has no
    kernels would leave the others waiting for it.
    """
    if device.type not in ("cuda", "cpu"):
        return Obstacle(f"the kernels are CUDA, the device is {device.type}", "Serve on an NVIDIA GPU")
    ranks.check_installation()
    try:
        path = paths.chosen()
    except ValueError as e:
        return Obstacle(str(e), f"Unset {paths.CHOICE}")
    return _failure(device, dtype, kv_dtype, path) if device.type == "cuda" else None


@functools.cache
def _failure(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, path: int) -> Obstacle | None:
    try:
        smoke(device, dtype, kv_dtype, path)
    except (RuntimeError, OSError) as e:
        unset = f"Unset {paths.CHOICE}, or run" if path != abi.PATH_AUTO else "Run"
        return Obstacle(f"the kernels do not run here: {e}", f"{unset} `apply.py apply --sglang {_package()}` here")
    return None


def smoke(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, path: int = abi.PATH_AUTO) -> None:
    """One request, one token, one head through mla_prep and mla_verify.

    Raises:
        RuntimeError: the library is missing, does not load, or holds no code for this device.
    """
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    table, kv_indptr, kv_indices, mask = ints(1, 2), ints(2), ints(2), torch.zeros(1, dtype=torch.int64, device=device)
    first, prefix = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
    ops.mla_prep(table, first, prefix, None, abi.MASK_NONE, 1, 1, 1, kv_indptr, kv_indices, mask)
    q = torch.zeros(1, 1, LATENT + ROPE, dtype=dtype, device=device)
    out = torch.empty(1, 1, LATENT, dtype=dtype, device=device)
    ops.mla_verify(
        q[..., :LATENT], q[..., LATENT:], q.to(kv_dtype), kv_indptr, kv_indices,
        torch.arange(2, dtype=torch.int32, device=device), None, mask, None, abi.MASK_PACKED, 1, 1, 1, 1.0, 0.0, out,
        torch.empty(0, dtype=torch.float32, device=device), path=path,
    )  # fmt: skip


def _serving_note(backend_name: str, device: torch.device, kv_dtype: torch.dtype) -> str:
    target = paths.target(device, paths.chosen(), kv_dtype)
    kernels = f"{target.name} kernels" if device.type == "cuda" else "reference"
    if target.few:
        kernels += f", of up to {abi.FEW_ROWS} query rows a request on its {target.few.name} ones"
    return f"treeverify: TARGET_VERIFY of {backend_name} (MLA) runs on treeverify's {kernels}."


def _disabled_note(backend_name: str, trees: bool) -> str:
    note = f"treeverify: {DISABLE} is set, TARGET_VERIFY stays on SGLang's own {backend_name} kernels."
    return f"{note} They DROP the mask of a draft tree: outputs are WRONG." if trees else note


@functools.cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)
