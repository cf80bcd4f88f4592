# SPDX-License-Identifier: Apache-2.0
"""A running batch of SGLang's spec v2, scheduled ahead of its worker, over a target and a drafter that read the pools.

Needs a patched SGLang of spec v2 on the path. Real: pools, radix cache, requests, ScheduleBatch, the reservation of
slots, FutureMap, the result processor, the attention backend that prepares the verify pass, and the worker with its
__init__. Only the two models are not: the target's logits after a token are a row of a table, chosen by a hash of the
text that the prepared metadata lets the token see in the pool, so that a wrong slot, mask, length or move shows in the
output. The drafter reads its own pool likewise and promises a distorted copy of the target's law.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mla_rig import Rig

VOCABULARY, MASK_TOKEN, CONTEXT, LAWS = 12, 11, 160, 997


def sampling(**parameters: Any) -> Any:
    """A request's parameters, as the tokenizer process leaves them."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 40, "temperature": 0.0, **parameters})
    params.normalize(None)
    params.verify(VOCABULARY)
    return params


class Law:
    """The target's: logits after a text."""

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self._laws = 2 * torch.randn(LAWS, VOCABULARY, generator=generator)
        self._errors = noise * torch.randn(LAWS, VOCABULARY, generator=generator)

    @staticmethod
    def _row(text: Sequence[int]) -> int:
        """Of all its tokens, so that none may be missing."""
        digest = 0
        for token in text:
            digest = (digest * 31 + token + 1) % 1_000_003
        return digest % LAWS

    def __call__(self, text: Sequence[int]) -> torch.Tensor:
        """fp32 [V]."""
        return self._laws[self._row(text)]

    def promised(self, text: Sequence[int]) -> torch.Tensor:
        """fp32 [V], the drafter's."""
        row = self._row(text)
        return self._laws[row] + self._errors[row]

    def alone(self, text: Sequence[int], count: int) -> list[int]:
        """What the target writes greedily, one token at a time."""
        text = list(text)
        for _ in range(count):
            text.append(int(self(text).argmax()))
        return text[len(text) - count :]


class Overlap:
    """Requests after their prefill, each with its first output token, and what decodes them."""

    def __init__(
        self, algorithm: str, prompts: Sequence[Sequence[int]], params: Sequence[Any], *, block: int, width: int,
        noise: float = 1.0, page_size: int = 1, backend: str = "flashinfer",
    ) -> None:  # fmt: skip
        from sglang.srt.layers.sampler import Sampler
        from sglang.srt.managers.overlap_utils import FutureMap
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

        self.rig = rig = Rig(
            speculative_algorithm=algorithm, speculative_num_draft_tokens=width, speculative_dflash_block_size=block,
            speculative_num_steps=1, speculative_eagle_topk=1, page_size=page_size, context=CONTEXT,
            attention_backend=backend, sampling_backend="pytorch", max_running_requests=8,
            cuda_graph_config=CudaGraphConfig(decode=PhaseConfig()),
        )  # fmt: skip
        self.law, self.block, self.width, self.page_size = Law(noise), block, width, page_size
        self.table, self.pool = rig.requests.req_to_token, rig.pool
        self.drafts = MHATokenToKVPool(rig.pool.size, page_size, torch.float32, 1, 8, 1, "cpu", False)
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        pages = () if page_size == 1 else (page_size,)
        self.allocator = kind(rig.pool.size, *pages, torch.bfloat16, "cpu", rig.pool, False)
        self.cache = RadixCache(CacheInitParams(False, rig.requests, self.allocator, page_size))
        config = rig.runner.model_config
        config.vocab_size, config.model_is_mrope = VOCABULARY, False
        embedding = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        shard = SimpleNamespace(
            num_org_elements=VOCABULARY, num_org_elements_padded=VOCABULARY, num_added_elements=0,
            num_added_elements_padded=0, org_vocab_start_index=0, added_vocab_start_index=VOCABULARY,
        )  # fmt: skip
        lm_head = SimpleNamespace(weight=torch.eye(VOCABULARY), shard_indices=shard)
        rig.runner.__dict__.update(
            model=SimpleNamespace(lm_head=lm_head, get_input_embeddings=lambda: embedding), sampler=Sampler(),
            decode_cuda_graph_runner=None, attn_backend=rig.backend(),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
        )  # fmt: skip
        self.worker = self._worker(algorithm)
        reqs = [
            Req(str(i), "", array("q", prompt), p, eos_token_ids=set(), vocab_size=VOCABULARY)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        self.everyone = reqs
        for req in reqs:
            self._prefill(req)
        lengths = torch.tensor([req.kv_committed_len for req in reqs])
        rows = torch.tensor([req.req_pool_idx for req in reqs])
        self.batch = ScheduleBatch(
            reqs=list(reqs), req_to_token_pool=rig.requests, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache, model_config=config, device="cpu", forward_mode=ForwardMode.DECODE,
            spec_algorithm=rig.runner.spec_algorithm, seq_lens=lengths, seq_lens_cpu=lengths.clone(),
            orig_seq_lens=lengths.clone(), seq_lens_sum=int(lengths.sum()), req_pool_indices=rows,
            req_pool_indices_cpu=rows.clone(), enable_overlap=True,
        )  # fmt: skip
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        self.batch.sampling_info = SamplingBatchInfo.from_schedule_batch(self.batch, VOCABULARY)
        self.futures: FutureMap = rig.runner.spec_algorithm.create_future_map(torch.device("cpu"), rig.requests)
        bonus = torch.tensor([req.output_ids[-1] for req in reqs])
        self._carry(make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=lengths), rows)
        with _no_streams():
            self.futures.publish(rows, lengths)
        self.processor = self._processor()

    def _worker(self, algorithm: str) -> Any:
        """DFLASH's or DDTREE's, by its own __init__; only the draft model's loading is left out."""
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState
        from sglang.srt.speculative import dflash_worker_v2

        layer = SimpleNamespace(self_attn=_DraftAttention())
        model = SimpleNamespace(
            layers=[layer], project_target_hidden=lambda hidden: hidden,
            prepare_context_hidden_for_kv=lambda layer, hidden: hidden,
        )  # fmt: skip
        hf_config = SimpleNamespace(block_size=self.block, dflash_config={"mask_token_id": MASK_TOKEN})
        runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config), token_to_kv_pool=self.drafts, forward=self._draft,
            attn_backend=None, decode_cuda_graph_runner=None, capture_tail_hooks=[],
        )  # fmt: skip
        draft_worker = SimpleNamespace(init_attention_backends=lambda: None, init_cuda_graphs=lambda **_: None)
        bundle = SimpleNamespace(
            draft_worker=draft_worker, draft_model_runner=runner, draft_model=model, resolved_attention_backend="triton"
        )
        target_worker = SimpleNamespace(
            model_runner=self.rig.runner, device="cpu", forward_batch_generation=self._target
        )
        kind = self.rig.runner.spec_algorithm.create_worker(self.rig.args)
        with mock.patch.object(dflash_worker_v2, "build_draft_tp_worker", return_value=bundle) as build:
            worker = kind(
                server_args=self.rig.args, gpu_id=0, ps=ParallelState.trivial(), nccl_port=0,
                target_worker=target_worker,
            )  # fmt: skip
        self.drafters_args = build.call_args.kwargs["server_args"]
        worker.init_attention_backends()
        worker.init_cuda_graphs()
        worker._use_triton_prepare_block = True  # interpreted; DFLASH has nothing else for the CPU
        return worker

    def _processor(self) -> Any:
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        nothing = SimpleNamespace(
            num_generated_tokens=0, forward_ct_decode=0, update_spec_metrics=lambda *a, **k: None,
            report_decode_stats=lambda *a, **k: None, stream_output=lambda *a: None,
        )  # fmt: skip
        given: dict[str, Any] = dict.fromkeys(SchedulerBatchResultProcessor.__dataclass_fields__)
        given.update(
            is_generation=True, enable_overlap=True, enable_overlap_mlx=False, server_args=self.rig.args,
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.cache, req_to_token_pool=self.rig.requests,
            model_config=SimpleNamespace(think_end_ids=None), metrics_reporter=nothing, output_streamer=nothing,
            draft_worker=self.worker, model_worker=self.worker,
        )  # fmt: skip
        return SchedulerBatchResultProcessor(**given)

    def _prefill(self, req: Any) -> None:
        """What a prefill leaves behind: the prompt in both pools, and the first output token."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        prompt = list(req.origin_input_ids)
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(req.origin_input_ids[:-1], None)))
        cached, length = match.device_indices, len(prompt)
        req.prefix_indices, req.last_node, req.cache_protected_len = cached, match.last_device_node, len(cached)
        self.cache.inc_lock_ref(req.last_node)
        [req.req_pool_idx] = self.rig.requests.alloc([req])
        if self.page_size == 1:
            slots = self.allocator.alloc(length - len(cached))
        else:
            before, after = torch.tensor([len(cached)]), torch.tensor([length])
            last = cached[-1:] if len(cached) else torch.tensor([-1])
            slots = self.allocator.alloc_extend(before, before, after, after, last, length - len(cached))
        self.table[req.req_pool_idx, :length] = torch.cat([cached, slots]).int()
        tokens, positions = torch.tensor(prompt[len(cached) :]), torch.arange(len(cached), length)
        self._write(slots, tokens)
        self.drafts.k_buffer[0][slots, 0, :3] = torch.stack([tokens, positions, positions], 1).float()
        req.kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
        req.kv_committed_len = length
        req._refresh_fill_ids()
        req.set_extend_range(len(cached), length)
        self.cache.cache_unfinished_req(req)
        req.output_ids.append(int(self.law(prompt).argmax()))

    def _write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        self.pool.kv_buffer[0][slots, 0, 0] = tokens.to(self.pool.dtype)

    def _target(self, *, forward_batch: Any, is_verify: bool, **_: Any) -> Any:
        """The verify pass, over what its backend prepared: KV of prefix and nodes in kv_indices, who sees whom."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.treeverify.attention.reference import unpack_mask

        self._write(forward_batch.out_cache_loc, forward_batch.input_ids)
        metadata = self.rig.runner.attn_backend.forward_metadata
        bs, n = metadata.bs, metadata.n
        mask = torch.ones(n, n, dtype=torch.bool).tril().expand(bs, n, n)
        if metadata.mask is not None and forward_batch.spec_info.__dict__.get("tree") is not None:
            words = -(-n // 64)
            mask = unpack_mask(metadata.mask[: bs * n * words].view(bs, n, words), n)
        logits = []
        for b in range(bs):
            mine = metadata.kv_indices[metadata.kv_indptr[b] : metadata.kv_indptr[b + 1]].long()
            text = self.pool.kv_buffer[0][mine, 0, 0].long()
            for i in range(n):
                logits.append(self.law([*text[:-n].tolist(), *text[-n:][mask[b, i]].tolist()]))
        hidden = torch.stack([forward_batch.input_ids, forward_batch.positions], 1).float()
        output = LogitsProcessorOutput(next_token_logits=torch.stack(logits), hidden_states=hidden)
        return GenerationBatchResult(logits_output=output, can_run_cuda_graph=False)

    def _draft(self, blocks: Any) -> Any:
        """The draft pass: continues each text of its own pool greedily; promises along that."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        own, hidden = self.drafts.k_buffer[0], []
        for b, (row, length) in enumerate(zip(blocks.req_pool_indices, blocks.seq_lens.tolist(), strict=True)):
            read = own[self.table[row, :length].long(), 0, :3].long()
            assert read[:, 1:].tolist() == [[i, i] for i in range(length)], "the drafter's KV is not of the text"
            ids = blocks.input_ids.view(-1, self.block)[b]
            assert ids[1:].tolist() == [MASK_TOKEN] * (self.block - 1)
            text = [*read[:, 0].tolist(), int(ids[0])]
            hidden.append(torch.zeros(VOCABULARY))
            for _ in range(self.block - 1):
                hidden.append(self.law.promised(text))
                text.append(int(self.law(text).argmax()))
        own[blocks.out_cache_loc] = -1.0  # its block's own KV, which nobody reads later
        output = LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.stack(hidden))
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    def _carry(self, draft: Any, rows: torch.Tensor) -> None:
        """The worker's output to the next step, as Scheduler.run_batch relays it."""
        from sglang.srt.managers.overlap_utils import RelayPayload

        self.futures.stash(rows, RelayPayload.from_draft_input(draft))
        self.batch.spec_info = draft
        draft.future_dsa_topk_indices_available = False
        draft.future_indices = rows

    def run(self, steps: int = 1000) -> list[Any]:
        """Decodes until all are done, each result processed when the next step is under way. Returns the results."""
        from sglang.srt.managers.overlap_utils import resolve_forward_inputs
        from sglang.srt.managers.scheduler import Scheduler

        results: list[Any] = []
        pending: list[tuple[Any, Any]] = []
        isolation = Scheduler._forward_isolation
        pinned = SimpleNamespace(record_batch_in_overlap=lambda batch: None)
        with _no_streams():
            while True:
                self.batch.filter_batch()
                if self.batch.is_empty() or len(results) == steps:
                    break
                self.batch.prepare_for_decode()
                self.futures.resolve_seq_lens_cpu(self.batch)
                resolve_forward_inputs(self.batch, self.futures)
                rows = self.batch.req_pool_indices
                with isolation(pinned, self.batch, overlap=True):
                    result = self.worker.forward_batch_generation(
                        self.batch, on_publish=lambda lens, rows=rows: self.futures.publish(rows, lens),
                        grammar_barrier=lambda: [self.processor.advance_grammar_fsm(r, b) for b, r in pending],
                    )  # fmt: skip
                self._carry(result.next_draft_input, rows)
                results.append(result)
                pending.append((self.batch.copy(), result))
                if len(pending) > 1:
                    self._process(*pending.pop(0))
            for late in pending:
                self._process(*late)
        return results

    def _process(self, batch: Any, result: Any) -> None:
        self.processor.process_batch_result_decode(batch, result)

    def unaccounted(self) -> int:
        """Slots neither free nor the cache's when nobody runs; 0 where each is exactly once."""
        free = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        assert len(free.unique()) == len(free), "a slot was freed twice"
        return self.allocator.size - len(free) * self.page_size - self.cache.evictable_size()


class _DraftAttention:
    """A drafter's layer whose keys are the features, token and position, and the position they are rotated by."""

    num_kv_heads, head_dim = 1, 8
    attn = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)

    def kv_proj_only(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.nn.functional.pad(hidden, (0, self.head_dim - hidden.shape[1]))
        return k, k

    def apply_k_norm(self, k: torch.Tensor) -> torch.Tensor:
        return k

    def apply_k_rope(self, positions: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k[:, 2] = positions
        return k


def _no_streams() -> ExitStack:
    """There are none on the CPU, but SGLang asks for them."""
    event = SimpleNamespace(record=lambda: None, wait=lambda: None, synchronize=lambda: None)
    stack = ExitStack()
    stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
    stack.enter_context(mock.patch.object(torch.cpu, "Event", lambda: event, create=True))
    stream = SimpleNamespace(wait_event=lambda _: None)
    stack.enter_context(mock.patch.object(torch.cpu, "current_stream", lambda *_: stream))
    return stack
