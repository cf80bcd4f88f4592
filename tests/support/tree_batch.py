# SPDX-License-Identifier: Apache-2.0
"""A decode batch of SGLang's own parts (pools, radix cache, requests, sampling info) and a target that is a table.

Needs a patched SGLang on the path. The target's logits after a token are a row of `table`, chosen by that token and
the one before it, so that a token's place in a tree matters; the drafter sees a distorted copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from mla_rig import parallel_groups, server_args

VOCABULARY, CONTEXT = 12, 256


def sampling(**parameters: Any) -> Any:
    """A request's parameters, as the tokenizer process leaves them."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 40, "temperature": 0.0, **parameters})
    params.normalize(None)
    params.verify(VOCABULARY)
    return params


class TreeBatch:
    """Requests after their prefill, each with its first output token."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Any], *, slots: int = 4096, seed: int = 0,
        eos: int | None = None, page_size: int = 1, **args: Any,
    ) -> None:  # fmt: skip
        from sglang.srt.layers.sampler import Sampler
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.treeverify.kv.pools import Mover

        parallel_groups()
        self.page_size = args["page_size"] = page_size
        options = {"speculative_algorithm": "DDTREE", "sampling_backend": "pytorch", **args}
        self.args = server_args(**options)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=self.generator) * 2
        self.requests = ReqToTokenPool(len(prompts) + 2, CONTEXT, "cpu", False)
        self.pool = MLATokenToKVPool(slots, page_size, torch.bfloat16, 8, 8, 1, "cpu", False)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.bfloat16, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, torch.bfloat16, "cpu", self.pool, False)
        self.mover = None if page_size == 1 else Mover(self.pool)
        self.cache = RadixCache(CacheInitParams(False, self.requests, self.allocator, page_size))
        self.sampler = Sampler()
        pairs = enumerate(zip(prompts, params, strict=True))
        reqs = [
            Req(str(i), "", list(prompt), p, eos_token_ids=set(), vocab_size=VOCABULARY) for i, (prompt, p) in pairs
        ]
        for req in reqs:
            req.tokenizer = None if eos is None else SimpleNamespace(eos_token_id=eos, additional_stop_token_ids=None)
        self.batch = ScheduleBatch(
            reqs=reqs, req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache, model_config=SimpleNamespace(vocab_size=VOCABULARY, think_end_id=None), device="cpu",
            forward_mode=ForwardMode.DECODE,
        )  # fmt: skip
        for req in reqs:
            self._prefill(req)
        self.refresh(reqs)

    def _prefill(self, req: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(req.origin_input_ids[:-1], None)))
        cached, length = match.device_indices, len(req.origin_input_ids)
        req.prefix_indices, req.last_node = cached, match.last_device_node
        req.cache_protected_len = len(cached)
        self.cache.inc_lock_ref(req.last_node)
        [req.req_pool_idx] = self.requests.alloc([req])
        slots = self._allocate(cached, length)
        self.requests.req_to_token[req.req_pool_idx, :length] = torch.cat([cached, slots]).int()
        req.fill_ids = list(req.origin_input_ids)
        req.kv_committed_len = req.kv_allocated_len = length
        self.cache.cache_unfinished_req(req)
        req.output_ids.append(int(self.table[req.origin_input_ids[-2], req.origin_input_ids[-1]].argmax()))

    def _allocate(self, cached: torch.Tensor, length: int) -> torch.Tensor:
        if self.page_size == 1:
            return self.allocator.alloc(length - len(cached))
        before, after = torch.tensor([len(cached)]), torch.tensor([length])
        last = cached[-1:] if len(cached) else torch.tensor([-1])
        return self.allocator.alloc_extend(before, before, after, after, last, length - len(cached))

    def refresh(self, reqs: list[Any]) -> None:
        """Makes `reqs` the batch, as the scheduler does where requests came or went."""
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        batch = self.batch
        batch.reqs = reqs
        lengths = [req.kv_committed_len for req in reqs]
        batch.seq_lens = torch.tensor(lengths, dtype=torch.int64)
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens.clone(), sum(lengths)
        batch.req_pool_indices = torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64)
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)

    def candidates(self, depth: int, k: int, noise: float = 1.0) -> Any:
        """A drafter's: the target's law after the greedy continuation, distorted; rank by rank."""
        from sglang.srt.treeverify.ddtree.tree import Candidates

        rows = []
        for req in self.batch.reqs:
            before, token = self._last_two(req)
            for _ in range(depth):
                rows.append(self.table[before, token])
                before, token = token, int(self.table[before, token].argmax())
        logits = torch.stack(rows).view(len(self.batch.reqs), depth, VOCABULARY)
        logits = logits + noise * torch.randn(logits.shape, generator=self.generator)
        logprobs, ids = torch.log_softmax(logits, -1).topk(k)
        return Candidates(ids, logprobs)

    def _last_two(self, req: Any) -> tuple[int, int]:
        before, token = (req.origin_input_ids + req.output_ids)[-2:]
        return before, token

    def logits(self, tree: Any) -> torch.Tensor:
        """fp32 [bs * n, V]: the target's, after each node."""
        before_root = torch.tensor([self._last_two(req)[0] for req in self.batch.reqs])[:, None]
        parents = tree.parents.long()
        before = torch.where(parents < 0, before_root, tree.tokens.gather(1, parents.clamp(min=0)))
        return self.table[before, tree.tokens].flatten(0, 1)

    def verify_input(self, candidates: Any, n: int, worker: Any = None) -> Any:
        """The step's real verify input, prepared: slots allocated and mapped. A `worker`'s own, where there is one."""
        from sglang.srt.treeverify.ddtree.stats import Stats
        from sglang.srt.treeverify.ddtree.tree import DraftTree
        from sglang.srt.treeverify.ddtree.verify_input import DDTreeVerifyInput

        root = torch.tensor([req.output_ids[-1] for req in self.batch.reqs])
        if worker is not None:
            worker._candidates, block = candidates, candidates.ids.shape[1] + 1
            chain = torch.cat([root[:, None], candidates.ids[:, :, 0]], 1)
            positions = self.batch.seq_lens[:, None] + torch.arange(block)
            made = worker.make_verify_input(
                draft_token=chain.view(-1), positions=positions.view(-1), draft_token_num=block
            )
            made.prepare_for_verify(self.batch, self.page_size)
            return made
        tree = DraftTree.build(candidates, root, self.batch.seq_lens, n)
        made = DDTreeVerifyInput(
            draft_token=tree.tokens.view(-1), positions=tree.positions.view(-1), draft_token_num=n, tree=tree,
            sampler=self.sampler, stats=Stats("cpu"), mover=self.mover,
        )  # fmt: skip
        made.prepare_for_verify(self.batch, self.page_size)
        return made

    def step(self, depth: int, n: int, k: int, noise: float = 1.0, worker: Any = None) -> dict[str, Any]:
        """One step; returns what the checks need of it."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        made = self.verify_input(self.candidates(depth, k, noise), n, worker)
        slots, before = self.batch.out_cache_loc.clone(), self.batch.seq_lens.clone()
        logits = self.logits(made.tree)
        hidden = torch.arange(len(slots), dtype=torch.float32)[:, None].repeat(1, 3)  # a row says which it is
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        bonus, lengths, kept, drafts = made.verify(batch=self.batch, logits_output=output, page_size=self.page_size)
        return {
            "tree": made.tree, "slots": slots, "before": before, "bonus": bonus, "lengths": lengths,
            "rows": kept[:, 0].long(), "drafts": drafts, "mask": made.custom_mask,
        }  # fmt: skip

    def finish(self, finished: list[Any]) -> None:
        """Releases requests and drops them as the running batch does: the others' sampling state goes on."""
        from sglang.srt.mem_cache.common import release_kv_cache

        for req in finished:
            release_kv_cache(req, self.cache)
        batch = self.batch
        kept = [i for i, req in enumerate(batch.reqs) if req not in finished]
        indices = torch.tensor(kept, dtype=torch.int64)
        batch.reqs = [batch.reqs[i] for i in kept]
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens[indices], batch.seq_lens_cpu[indices]
        batch.req_pool_indices, batch.seq_lens_sum = batch.req_pool_indices[indices], int(batch.seq_lens.sum())
        batch.sampling_info.filter_batch(kept, indices)

    def unaccounted(self) -> int:
        """Slots that are neither free, nor the cache's, nor in a running request's own pages; 0 where that is exact."""
        page = self.page_size
        own = sum(-(-(req.kv_allocated_len - req.cache_protected_len) // page) * page for req in self.batch.reqs)
        held = self.cache.evictable_size() + self.cache.protected_size()
        free = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        assert len(free.unique()) == len(free), "a slot was freed twice"
        return self.allocator.size - len(free) * page - held - own
