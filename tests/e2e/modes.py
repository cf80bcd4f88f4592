# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: arguments of sglang.Engine, environment, and what each must show."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH, WIDE = 16, 64
"""Nodes of a tree."""

DRAFTED = ("DFLASH", "DDTREE")
"""Algorithms that need a drafter."""


@dataclass(frozen=True)
class Mode:
    """One server. `right`: its outputs must be the target's own; else they must visibly not be."""

    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    right: bool = True
    trace: bool = False
    hooks: tuple[str, ...] = ()
    """Of scheduler_hooks.py."""
    spec_v1: bool = False
    """Whether only releases with workers of spec v1 have it."""

    @property
    def kv_cache_dtype(self) -> str:
        """What its KV cache holds, in the words of SGLang's argument."""
        return str(self.arguments.get("kv_cache_dtype", "auto"))


_NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": WIDTH,
    "speculative_ngram_max_bfs_breadth": 6,
}
_DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_attention_backend": "triton"}
DDTREE = {**_DFLASH, "speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": WIDTH}
ADAPT = {"TREEVERIFY_DDTREE_ADAPT": "1"}
_DROP = {"TREEVERIFY_DROP_MASK_FOR_TEST": "1"}
_TRITON = {"attention_backend": "triton"}
_FP8 = {"kv_cache_dtype": "fp8_e4m3", "disable_radix_cache": False}
"""With the radix cache: a prompt's second pass is a prefill behind a cached prefix, which reads the pool as well."""

MODES = {
    "dflash": Mode(_DFLASH, trace=True),
    "ngram": Mode(_NGRAM, trace=True),
    "ngram_eager": Mode({**_NGRAM, "disable_cuda_graph": True}),
    "ngram_mask_dropped": Mode(_NGRAM, _DROP, right=False),
    "ngram_stock": Mode(_NGRAM, {"TREEVERIFY_DISABLE": "1"}, right=False),
    "ddtree": Mode(DDTREE, trace=True),
    "ddtree_eager": Mode({**DDTREE, "disable_cuda_graph": True}),
    "ddtree_wide": Mode({**DDTREE, "speculative_num_draft_tokens": WIDE}),
    "ddtree_widths": Mode(
        {**DDTREE, "speculative_num_draft_tokens": WIDE}, ADAPT, hooks=("alternate",), spec_v1=True
    ),
    "ddtree_pages": Mode({**DDTREE, "page_size": 64}),
    "ddtree_mask_dropped": Mode(DDTREE, _DROP, right=False),
    "ngram_triton": Mode({**_NGRAM, **_TRITON}, trace=True),
    "ngram_triton_mask_dropped": Mode({**_NGRAM, **_TRITON}, _DROP, right=False),
    "ddtree_triton": Mode({**DDTREE, **_TRITON}),
    "ngram_fp8": Mode({**_NGRAM, **_FP8}, trace=True),
    "ddtree_fp8": Mode({**DDTREE, **_FP8}),
    "ngram_triton_fp8": Mode({**_NGRAM, **_FP8, **_TRITON}),
    "ngram_fp8_mask_dropped": Mode({**_NGRAM, **_FP8}, _DROP, right=False),
}


def spec_v2() -> bool:
    """Whether the SGLang on the path has DFLASH's worker of spec v2, for overlap scheduling. It is not imported."""
    found = importlib.util.find_spec("sglang")
    folders = (found.submodule_search_locations or []) if found else []
    return any((Path(folder) / "srt/speculative/dflash_worker_v2.py").exists() for folder in folders)


def chosen() -> dict[str, Mode]:
    """The modes named in $TV_MODES, all that this release has where it is empty.

    Raises:
        KeyError: there is no such mode.
    """
    names = os.environ.get("TV_MODES", "").split()
    if names:
        return {name: MODES[name] for name in names}
    v2 = spec_v2()
    return {name: mode for name, mode in MODES.items() if not (v2 and mode.spec_v1)}


def engine_arguments(target: Path, draft: Path | None = None, **more: Any) -> dict[str, Any]:
    """What all servers share by default: one GPU, FlashInfer, buckets 1, 4 and 8, pools so small that several fit.

    `draft` is the drafter's folder, for an algorithm that needs one.
    """
    if more.get("speculative_algorithm") in DRAFTED:
        more["speculative_draft_model_path"] = str(draft)
    return {
        "model_path": str(target), "attention_backend": "flashinfer", "sampling_backend": "pytorch",
        "skip_tokenizer_init": True, "disable_piecewise_cuda_graph": True, "disable_radix_cache": True,
        "cuda_graph_bs": [1, 4, 8], "cuda_graph_max_bs": 8, "max_running_requests": 8, "max_total_tokens": 65536,
        "mem_fraction_static": 0.5, "dtype": "bfloat16", "random_seed": 0, "log_level": "info", **more,
    }  # fmt: skip
