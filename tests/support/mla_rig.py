# SPDX-License-Identifier: Apache-2.0
"""SGLang's own MLA target side, no model: pools, attention layer, attention backend, graph runner, batches.

Needs a patched or stock SGLang on the path. Everything is SGLang's. On the CPU FlashInfer's two wrappers cannot be
constructed (they allocate pinned memory): `NoWrapper` takes their place, keeps what plan() was given, and fails where a
kernel would run.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import releases
import torch

HEADS, LATENT, ROPE, CONTEXT, ROWS = 4, 512, 64, 192, 8


class NoWrapper:
    """Stands where FlashInfer's wrappers are constructed; `planned` holds the arguments of plan()."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.planned: tuple[Any, ...] | None = None

    def plan(self, *args: Any) -> None:
        self.planned = args

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("FlashInfer's kernel was about to run")


@functools.cache
def parallel_groups() -> None:
    """One-rank process groups, as a server with tp 1 has them."""
    from sglang.srt.distributed import parallel_state

    store = tempfile.mktemp()
    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")


def server_args(**changes: Any) -> Any:
    """ServerArgs with its defaults and `changes`, without the checks of its __post_init__, which want a model."""
    defaults = {"model_path": "none", "device": "cpu", "page_size": 1, "attention_backend": "flashinfer"}
    return releases.imported().server_args({**defaults, "speculative_algorithm": "EAGLE", **changes})


class Rig:
    """A target model runner's parts, and one attention layer."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        heads: int = HEADS,
        context: int = CONTEXT,
        is_draft_worker: bool = False,
        seed: int = 0,
        **args: Any,
    ) -> None:
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.layers.attention import flashinfer_mla_backend as module
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        options = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8, "device": device, **args}
        self.args = server_args(**options)
        parallel_groups()
        if device == "cpu":
            module.BatchMLAPagedAttentionWrapper = NoWrapper
            module.BatchPrefillWithRaggedKVCacheWrapper = NoWrapper
        self.module, self.dtype, self.device, self.heads = module, dtype, device, heads
        self.generator = torch.Generator().manual_seed(seed)
        config = SimpleNamespace(
            context_len=context, num_attention_heads=heads, kv_lora_rank=LATENT, qk_nope_head_dim=128,
            qk_rope_head_dim=ROPE, v_head_dim=128, scaling=(128 + ROPE) ** -0.5, hidden_size=256, vocab_size=32,
            dtype=dtype, is_encoder_decoder=False, hf_config=SimpleNamespace(), is_hybrid_swa=False,
            attention_arch=AttentionArch.MLA, swa_v_head_dim=128, get_num_kv_heads=lambda size: heads,
        )  # fmt: skip
        page = self.args.page_size
        width = context + 4 + self.args.speculative_num_draft_tokens
        size = ROWS * -(-width // page) * page
        self.pool = MLATokenToKVPool(size, page, kv_dtype or dtype, LATENT, ROPE, 1, device, False)
        keys = torch.empty(self.pool.kv_buffer[0].shape, dtype=dtype, device=device)
        keys.normal_(generator=torch.Generator(device).manual_seed(seed))
        self.pool.get_key_buffer(0).copy_(keys)
        self.requests = ReqToTokenPool(ROWS, width, device, False)
        self.layer = RadixAttention(heads, LATENT + ROPE, config.scaling, 1, layer_id=0, v_head_dim=LATENT)
        self.runner = SimpleNamespace(
            model_config=config, device=device, page_size=page, req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool, dtype=dtype, kv_cache_dtype=self.pool.dtype, server_args=self.args,
            is_draft_worker=is_draft_worker, hisparse_coordinator=None, use_mla_backend=True, gpu_id=0,
            sliding_window_size=None, token_to_kv_pool_allocator=None, hybrid_gdn_config=None,
            kimi_linear_config=None, linear_attn_model_spec=None,
            spec_algorithm=SpeculativeAlgorithm.from_string(self.args.speculative_algorithm),
        )  # fmt: skip
        self.release = releases.imported()
        self.release.complete(config, self.runner)

    def stored(self, k: torch.Tensor) -> torch.Tensor:
        """What the pool keeps of keys of the model's dtype: in the pool's, divided by the layer's k_scale."""
        return (k if self.layer.k_scale is None else k / self.layer.k_scale).to(self.pool.dtype)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)

    def backend(self, **kwargs: Any) -> Any:
        """A new attention backend of this runner, by the server's name for it; with `skip_prefill` a draft step's."""
        name = self.args.attention_backend
        if kwargs.get("skip_prefill"):
            return self.release.step_backend(self.runner, name, **kwargs)
        return self.release.make_backend(self.runner, name)

    def graph_runner(self, attn_backend: Any, bs: int, n: int) -> Any:
        """The real graph runner with one bucket, as its __init__ leaves it just before it captures."""
        return self.release.graph_runner(self, attn_backend, bs, n)

    def step(self, prefixes: Sequence[int], n: int, **kwargs: Any) -> Step:
        """A verify step of requests with these prefix lengths and `n` draft tokens each."""
        return Step(self, list(prefixes), n, **kwargs)


class Step:
    """A batch in TARGET_VERIFY: slots handed out, req_to_token written, q, k and a random tree drawn."""

    def __init__(self, rig: Rig, prefixes: list[int], n: int, chain: bool = False) -> None:
        bs = len(prefixes)
        self.rig, self.prefixes, self.n, self.bs = rig, prefixes, n, bs
        rows = torch.randperm(ROWS, generator=rig.generator)[:bs] + 1
        page, table, draft = rig.pool.page_size, rig.requests.req_to_token, []
        pages = torch.randperm(rig.pool.size // page, generator=rig.generator) + 1  # page 0 is nobody's
        for row, length in zip(rows.tolist(), prefixes, strict=True):
            count = -(-(length + n) // page)
            taken, pages = pages[:count], pages[count:]
            mine = (taken[:, None] * page + torch.arange(page)).flatten()[: length + n]
            table[row, : length + n] = mine.int().to(rig.device)
            draft.append(mine[length:])
        self.req_pool_indices = rows.to(torch.int64).to(rig.device)
        self.out_cache_loc = torch.cat(draft).to(torch.int64).to(rig.device)
        self.seq_lens_cpu = torch.tensor(prefixes, dtype=torch.int64)
        self.seq_lens = self.seq_lens_cpu.to(rig.device)
        self.visible = (causal(bs, n) if chain else random_trees(bs, n, rig.generator)).to(rig.device)
        self.q_nope = rig.randn(rig.heads, bs * n, LATENT).transpose(0, 1)  # strides of the absorbed projection
        self.q_rope = rig.randn(bs * n, rig.heads, ROPE)
        self.k, self.k_rope = rig.randn(bs * n, 1, LATENT), rig.randn(bs * n, 1, ROPE)

    def full_mask(self) -> torch.Tensor:
        """bool, per request [n, prefix + n] flattened and concatenated, as EAGLE and NGRAM hand it over."""
        rows = []
        for visible, prefix in zip(self.visible, self.prefixes, strict=True):
            before = torch.ones(self.n, prefix, dtype=torch.bool, device=visible.device)
            rows.append(torch.cat([before, visible], 1).flatten())
        return torch.cat(rows)

    def spec_info(self, kind: str) -> Any:
        """The real verify input of an algorithm, holding this step's mask: eagle, ngram, ngram_qlen or dflash."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        if kind == "eagle":
            from sglang.srt.speculative.eagle_info import EagleVerifyInput

            return EagleVerifyInput(
                draft_token=None, custom_mask=self.full_mask(), positions=None, retrieve_index=None,
                retrieve_next_token=None, retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=3, topk=4,
                draft_token_num=self.n, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None,
                seq_lens_cpu=None,
            )  # fmt: skip
        if kind == "dflash":
            from sglang.srt.speculative.dflash_info import DFlashVerifyInput

            return DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=self.n)
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        mask = self.full_mask() if kind == "ngram" else self.visible.flatten()
        return NgramVerifyInput(None, mask, None, None, None, None, self.n)

    def forward_batch(self, kind: str) -> Any:
        """A real ForwardBatch; NGRAM's carries a stale seq_lens_sum, as its worker leaves it."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

        stale, tokens = kind.startswith("ngram"), self.bs * self.n
        return self.rig.release.forward_batch(
            self.rig, forward_mode=ForwardMode.TARGET_VERIFY, batch_size=self.bs,
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=self.rig.device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=self.rig.device),
            req_pool_indices=self.req_pool_indices, seq_lens=self.seq_lens, out_cache_loc=self.out_cache_loc,
            seq_lens_sum=1 if stale else sum(self.prefixes), seq_lens_cpu=self.seq_lens_cpu.clone(),
            spec_info=self.spec_info(kind), capture_hidden_mode=CaptureHiddenMode.FULL,
        )  # fmt: skip

    def padded(self, rows: int) -> Step:
        """This step with `rows` rows of ones behind its q and k, whose KV goes to the dummy slot 0."""
        copy = object.__new__(Step)
        copy.__dict__.update(self.__dict__)
        for name in ("q_nope", "q_rope", "k", "k_rope"):
            part = getattr(self, name)
            setattr(copy, name, torch.cat([part, part.new_ones(rows, *part.shape[1:])]))
        return copy

    def attend(self, backend: Any, batch: Any, split: bool = True) -> torch.Tensor:
        """forward_extend of the layer: [T, H * 512]."""
        if split:
            parts = {"q_rope": self.q_rope, "k_rope": self.k_rope}
            return backend.forward_extend(self.q_nope, self.k, self.k, self.rig.layer, batch, **parts)
        q, k = torch.cat([self.q_nope, self.q_rope], -1), torch.cat([self.k, self.k_rope], -1)
        return backend.forward_extend(q.flatten(1), k, self.k, self.rig.layer, batch)

    def found(self, out: torch.Tensor) -> dict[str, Any]:
        """What a test asks of an attention's output: its error with the tree and with a chain, and the KV it wrote."""
        saved = self.rig.pool.get_key_buffer(0)[self.out_cache_loc, 0]
        return {
            "tree": worst_row(out, self.expected()),
            "causal": worst_row(out, self.expected(causal(self.bs, self.n))),
            "kv": bool(torch.equal(saved, self.rig.stored(torch.cat([self.k, self.k_rope], -1)[:, 0]))),
            "shape": list(out.shape),
        }

    def expected(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [T, H * 512], written out once more here: softmax over prefix and visible draft rows.

        Draft keys are the step's own k, whatever the pool holds in their slots.
        """
        visible = self.visible if visible is None else visible
        pool, scale = self.rig.pool.get_key_buffer(0)[:, 0], self.rig.layer.k_scale_float or 1.0
        drafts = self.rig.stored(torch.cat([self.k, self.k_rope], -1)[:, 0])
        drafts = scale * drafts.double().view(self.bs, self.n, LATENT + ROPE)
        q = torch.cat([self.q_nope, self.q_rope], -1).double().view(self.bs, self.n, self.rig.heads, LATENT + ROPE)
        out = []
        for b, prefix in enumerate(self.prefixes):
            before = self.rig.requests.req_to_token[self.req_pool_indices[b], :prefix].long()
            mine = torch.cat([scale * pool[before].double(), drafts[b]])
            allowed = torch.cat([visible.new_ones(self.n, prefix), visible[b]], 1)
            score = torch.einsum("qhd,kd->hqk", q[b], mine) * self.rig.layer.scaling
            if self.rig.layer.logit_cap:
                score = self.rig.layer.logit_cap * torch.tanh(score / self.rig.layer.logit_cap)
            weight = torch.softmax(score.masked_fill(~allowed, float("-inf")), -1)
            out.append(torch.einsum("hqk,kd->qhd", weight, mine[:, :LATENT]).flatten(1))
        return torch.cat(out)


def causal(bs: int, n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril().expand(bs, n, n)


def random_trees(bs: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """bool [bs, n, n]: node i sees itself and its ancestors. No tree is a chain: the last node's parent is node 0."""
    visible = torch.zeros(bs, n, n, dtype=torch.bool)
    for b in range(bs):
        for i in range(n):
            parent = 0 if i in (0, n - 1) else int(torch.randint(0, i, (1,), generator=generator))
            visible[b, i] = visible[b, parent]
            visible[b, i, i] = True
    return visible


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 error of a row and head; inf where anything is not finite."""
    out, expected = (t.double().unflatten(-1, (-1, LATENT)) for t in (out, expected))
    error = float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return error if bool(torch.isfinite(out).all()) else float("inf")
