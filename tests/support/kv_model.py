# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests over SGLang's real pools, against a model of plain Python that knows what every row holds.

    PYTHONPATH=PATCHED/python:tests/support python tests/support/kv_model.py [--steps 100000] [--interpret]

Needs a patched SGLang. Real: allocators, req_to_token, radix cache, requests, KV pools of a target and a drafter,
DDTREE's allocation, draft pass, commit and move, and defrag. A row of a pool holds a hash of the tokens up to it, so
that the model knows each row of each layer from the request's text alone. After every step: free, cached and held
pages are every page exactly once, and the rows of the requests concerned are right; now and then, those of everybody
and of the cache. Triton's kernels run interpreted with --interpret; else plain PyTorch takes their place, which is
a hundred times as fast.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    import cpu_sglang

    cpu_sglang.prepare()

import torch
from absent_kernels import absent
from mla_rig import parallel_groups, server_args

absent()

CONTEXT, VOCABULARY, REQUESTS, BLOCK = 400, 6, 6, 8
LAYERS = (3, 2)
"""Of the target (one buffer each) and of the drafter (two)."""
EVERYBODY = 40
"""Steps between two looks at everything."""
MIX = 0x9E3779B97F4A7C15


def digest(before: int, token: int) -> int:
    """Of a text, from that of all but its last token."""
    x = (before ^ (token + 1)) * MIX & (1 << 64) - 1
    return (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & (1 << 62) - 1


def _contents(rows: Sequence[torch.Tensor], digests: Sequence[int]) -> torch.Tensor:
    """int64 [layers, rows, words]: what these rows of the layers hold; no two layers the same."""
    layers, words = torch.arange(1, len(rows) + 1)[:, None, None], torch.arange(1, rows[0].shape[1] + 1)
    return torch.tensor(digests, dtype=torch.int64)[:, None] * (layers * 64 + words)


class World:
    """Requests, pools and the model. Every method that is a step ends with check()."""

    def __init__(self, page_size: int, pages: int, seed: int, *, need_sort: bool, radix: bool, window: bool) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput
        from sglang.srt.treeverify.ddtree.draft_pass import DraftPass
        from sglang.srt.treeverify.kv.pools import Mover

        parallel_groups()
        server_args(speculative_algorithm="DDTREE", page_size=page_size)
        self.draw, self.page_size = random.Random(seed), page_size
        size = pages * page_size
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT + 80, "cpu", False)
        self.target = MLATokenToKVPool(size, page_size, torch.bfloat16, 8, 8, LAYERS[0], "cpu", False)
        self.drafter = MHATokenToKVPool(size, page_size, torch.bfloat16, 1, 8, LAYERS[1], "cpu", False)
        self.buffers = [*self.target.kv_buffer, *self.drafter.k_buffer, *self.drafter.v_buffer]
        for buffer in self.buffers:
            buffer.view(torch.uint8).fill_(0xEE)
        words = [buffer.view(torch.int64).flatten(1) for buffer in self.buffers]
        self.rows_of_target, self.rows_of_drafter = words[: LAYERS[0]], words[LAYERS[0] :]
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paged = () if page_size == 1 else (page_size,)
        self.allocator = kind(size, *paged, torch.bfloat16, "cpu", self.target, need_sort)
        self.cache = RadixCache(CacheInitParams(not radix, self.requests, self.allocator, page_size))
        self.mover, self.both = Mover(self.target), Mover(self.target, self.drafter)
        self.window = torch.zeros_like(self.requests.req_to_token) if window else None
        self.batch = ScheduleBatch(
            reqs=[], req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache, model_config=SimpleNamespace(vocab_size=VOCABULARY), device="cpu",
            forward_mode=ForwardMode.DECODE,
        )  # fmt: skip
        spec = DFlashVerifyInput(torch.empty(0), torch.empty(0), BLOCK)
        runner = SimpleNamespace(
            req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator, token_to_kv_pool=self.drafter,
            attn_backend=None, forward=self._draft,
        )  # fmt: skip
        self.draft_pass = DraftPass(runner, spec, 0, "cpu")
        self.texts: dict[str, list[int]] = {}
        """Of each request: all tokens whose KV it has."""
        self.digests: dict[str, list[int]] = {}
        self.windows: dict[str, int] = {}
        """Tokens of each request in its window."""
        self.done: Counter[str] = Counter()
        self._named = 0

    # What the models would write.

    def _write(self, rows: Sequence[torch.Tensor], slots: torch.Tensor, digests: Sequence[int]) -> None:
        for words, values in zip(rows, _contents(rows, digests), strict=True):
            words[slots] = values

    def _draft(self, blocks: Any) -> Any:
        """The drafter's pass writes into slots that it gives back."""
        self._write(self.rows_of_drafter, blocks.out_cache_loc, [-5] * len(blocks.out_cache_loc))
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(len(blocks.out_cache_loc), 1)))

    def _wrong(self, rows: Sequence[torch.Tensor], slots: torch.Tensor, digests: Sequence[int]) -> bool:
        pairs = zip(rows, _contents(rows, digests), strict=True)
        return not all(torch.equal(words[slots], values) for words, values in pairs)

    # Steps.

    def start(self) -> bool:
        """A request comes, whose text may begin as an older one's, and is prefilled."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import alloc_paged_token_slots_extend, alloc_token_slots
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        if len(self.batch.reqs) >= REQUESTS:
            return False
        old = self.draw.choice([*self.texts.values(), []])[: CONTEXT - 90]
        text = [*old[: self.draw.randint(0, len(old))], *self._tokens(self.draw.randint(1, 90))]
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(text[:-1], None)))
        cached, length = match.device_indices, len(text)
        self._named += 1
        req = Req(f"r{self._named}", "", text, SamplingParams(), eos_token_ids=set(), vocab_size=VOCABULARY)
        req.prefix_indices, req.last_node = cached, match.last_device_node
        req.cache_protected_len = len(cached)
        self.cache.inc_lock_ref(req.last_node)
        if not self._room(1, length - len(cached)):
            self.cache.dec_lock_ref(req.last_node)
            return False
        [req.req_pool_idx] = self.requests.alloc([req])
        if self.page_size == 1:
            slots = alloc_token_slots(self.cache, length - len(cached))
        else:
            last = cached[-1:] if len(cached) else torch.tensor([-1])
            before, after = torch.tensor([len(cached)]), torch.tensor([length])
            slots = alloc_paged_token_slots_extend(
                self.cache, before, before, after, after, last, length - len(cached)
            )
        self.requests.req_to_token[req.req_pool_idx, :length] = torch.cat([cached, slots]).int()
        digests = self._digests([], text)
        self._write(self.rows_of_target, slots, digests[len(cached) :])
        self._write(self.rows_of_drafter, slots, digests[len(cached) :])
        self.texts[req.rid], self.digests[req.rid] = list(text), digests
        req.fill_ids = list(text)
        req.kv_committed_len = req.kv_allocated_len = length
        self.cache.cache_unfinished_req(req)
        self._batch([*self.batch.reqs, req])
        self._refill_window(req)
        return self.check([req])

    def step(self) -> bool:
        """Draft pass, a tree of random shape, a random path of it accepted, committed; the drafter's KV appended."""
        from sglang.srt.speculative.dflash_info import DFlashDraftInput
        from sglang.srt.treeverify.ddtree.commit import Accepted, Commit
        from sglang.srt.treeverify.ddtree.masks import MaskForm
        from sglang.srt.treeverify.ddtree.verify_input import DDTreeVerifyInput

        batch, n = self.batch, self.draw.choice([BLOCK, BLOCK + 1, 16, 17, 33, self.draw.randint(BLOCK, 70)])
        bs = len(batch.reqs)
        if not bs or not self._room(bs, n):
            return False
        if self.window is None:  # else DFLASH's own pass would run
            draft = DFlashDraftInput(
                bonus_tokens=torch.zeros(bs, dtype=torch.int64), target_hidden=torch.empty(0, 1),
                ctx_lens=torch.zeros(bs, dtype=torch.int32), draft_seq_lens=batch.seq_lens.int(),
            )  # fmt: skip
            self.draft_pass(batch, draft, lambda ids: torch.zeros(*ids.shape, 1))
        parents = [[-1] + [self.draw.randint(max(0, i - 6), i - 1) for i in range(1, n)] for _ in range(bs)]
        tokens = [self._tokens(n) for _ in range(bs)]
        made = DDTreeVerifyInput(
            draft_token=torch.tensor(tokens).flatten(), positions=torch.zeros(bs * n, dtype=torch.int64),
            draft_token_num=n, mask_form=MaskForm.PACKED,
        )  # fmt: skip
        made.prepare_for_verify(batch, self.page_size)
        slots, accepted, written = batch.out_cache_loc.view(bs, n), [], []
        for b, req in enumerate(batch.reqs):
            at = []
            for i in range(n):
                before = self.digests[req.rid][-1] if i == 0 else at[parents[b][i]]
                at.append(digest(before, tokens[b][i]))
            self._write(self.rows_of_target, slots[b], at)
            path = [node := self.draw.randrange(n)] if self.draw.random() < 0.9 else [node := 0]
            while node:
                path.append(node := parents[b][node])
            path = path[::-1][: self.draw.choice([len(path), len(path), self.draw.randint(1, len(path))])]
            accepted.append(Accepted(path, 0))
            written.append([at[node] for node in path])
        prefix_lens = batch.seq_lens_cpu.tolist()
        Commit.of(accepted, n, torch.device("cpu"), prefix_lens, self.page_size).apply(batch, self.mover)
        ends = iter(batch.out_cache_loc.split([len(mine.nodes) for mine in accepted]))
        for b, (req, mine) in enumerate(zip(batch.reqs, accepted, strict=True)):
            self._write(self.rows_of_drafter, next(ends), written[b])
            self.texts[req.rid] += [tokens[b][node] for node in mine.nodes]
            self.digests[req.rid] += written[b]
            req.output_ids += [tokens[b][node] for node in mine.nodes]
            self._refill_window(req)
        for req in [req for req in batch.reqs if req.kv_committed_len > CONTEXT]:
            self._release(req, True)
        return self.check(batch.reqs)

    def finish(self) -> bool:
        """A request ends; its text goes to the cache, or, where it is retracted or aborted, does not."""
        if not self.batch.reqs:
            return False
        self._release(self.draw.choice(self.batch.reqs), self.draw.random() < 0.7)
        return self.check([])

    def evict(self) -> bool:
        """The cache gives up some of what nobody uses."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if not self.cache.evictable_size():
            return False
        self.cache.evict(EvictParams(num_tokens=self.draw.randint(1, self.cache.evictable_size())))
        return self.check([])

    def defrag(self) -> bool:
        """A request's own slots are moved together."""
        from sglang.srt.treeverify.kv.defrag import Window, defrag, pieces_of

        if not self.batch.reqs:
            return False
        req = self.draw.choice(self.batch.reqs)
        row = self.requests.req_to_token[req.req_pool_idx]
        before, begin = row.clone(), req.cache_protected_len
        window = None if self.window is None else Window(self.window, self.windows[req.rid])
        moved = defrag(req, self.requests.req_to_token, self.allocator, self.both, window)
        if moved is None:
            assert torch.equal(before, row)
            return False
        assert torch.equal(before[:begin], row[:begin]), "a slot of the radix cache moved"
        assert pieces_of(row[begin : req.kv_committed_len]) == 1 and moved.pieces > 1
        return self.check(self.batch.reqs)

    # Checks.

    def check(self, concerned: Sequence[Any]) -> bool:
        """Raises AssertionError where a page is lost, held twice, or a row is not what its text says."""
        page, held = self.page_size, []
        for req in self.batch.reqs:
            assert req.kv_committed_len == req.kv_allocated_len == len(self.texts[req.rid])
            row = self.requests.req_to_token[req.req_pool_idx, : req.kv_committed_len].long()
            held.append(row[req.cache_protected_len :: page] // page)
            place = torch.arange(len(row)) % page
            assert torch.equal(row % page, place) or page == 1, "positions are out of step with their pages"
            assert torch.equal(row // page, (row // page)[torch.arange(len(row)) // page * page]), "a page is split"
        cached = self.cache.all_values_flatten() if self.cache.root_node.children else torch.empty(0).long()
        free = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        pages = torch.cat([free, cached[::page] // page, *held]).sort().values
        whole = torch.arange(1, self.allocator.size // page + 1)
        assert torch.equal(pages, whole), f"lost or held twice: {set(whole.tolist()) ^ set(pages.tolist())}, {pages}"
        self.done["checks"] += 1
        everybody = self.done["checks"] % EVERYBODY == 0
        for req in self.batch.reqs if everybody else concerned:
            self._check_rows(req)
        if everybody:
            self._check_cache(self.cache.root_node, 0)
        return True

    def _check_rows(self, req: Any) -> None:
        row = self.requests.req_to_token[req.req_pool_idx, : req.kv_committed_len].long()
        digests = self.digests[req.rid]
        assert not self._wrong(self.rows_of_target, row, digests), f"the target's KV of {req.rid}"
        assert not self._wrong(self.rows_of_drafter, row, digests), f"the drafter's KV of {req.rid}"
        if self.window is not None:
            tokens = self.windows[req.rid]
            mine = self.window[req.req_pool_idx, :tokens].long()
            assert torch.equal(mine, row[len(row) - tokens :]), f"the drafter's window of {req.rid}"

    def _check_cache(self, node: Any, before: int) -> None:
        for child in node.children.values():
            digests, at = [], before
            for token in child.key.token_ids:
                digests.append(at := digest(at, token))
            assert not self._wrong(self.rows_of_target, child.value, digests), "the target's KV in the cache"
            assert not self._wrong(self.rows_of_drafter, child.value, digests), "the drafter's KV in the cache"
            self._check_cache(child, at)

    # Bookkeeping.

    def _tokens(self, count: int) -> list[int]:
        return self.draw.choices(range(VOCABULARY), k=count)

    def _digests(self, before: list[int], tokens: Sequence[int]) -> list[int]:
        found, at = list(before), before[-1] if before else 0
        for token in tokens:
            found.append(at := digest(at, token))
        return found

    def _room(self, requests: int, tokens: int) -> bool:
        """Whether so many tokens of each have room, once the cache has made some; as the scheduler sees to it."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        pages = requests * (-(-tokens // self.page_size) + 1)
        evict_from_tree_cache(self.cache, pages * self.page_size)
        return self.allocator.available_size() >= pages * self.page_size

    def _refill_window(self, req: Any) -> None:
        """As DFLASH does after each append, with a window of half of what the request has."""
        if self.window is not None:
            row, end = self.requests.req_to_token[req.req_pool_idx], req.kv_committed_len
            self.windows[req.rid] = tokens = end // 2
            self.window[req.req_pool_idx, :tokens] = row[end - tokens : end]

    def _release(self, req: Any, insert: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.cache, is_insert=insert)
        if len(self.texts) > 40:  # others may begin as it did
            del self.texts[next(rid for rid in self.texts if rid not in {other.rid for other in self.batch.reqs})]
        self._batch([other for other in self.batch.reqs if other is not req])

    def _batch(self, reqs: list[Any]) -> None:
        batch, lengths = self.batch, [req.kv_committed_len for req in reqs]
        batch.reqs = reqs
        batch.seq_lens = torch.tensor(lengths, dtype=torch.int64)
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens.clone(), sum(lengths)
        batch.req_pool_indices = torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64)


WORLDS: list[dict[str, Any]] = [
    {"page_size": 16, "pages": 110, "need_sort": False, "radix": True, "window": False},
    {"page_size": 1, "pages": 1500, "need_sort": False, "radix": True, "window": False},
    {"page_size": 32, "pages": 60, "need_sort": True, "radix": True, "window": True},
    {"page_size": 64, "pages": 36, "need_sort": False, "radix": False, "window": False},
    {"page_size": 1, "pages": 1200, "need_sort": True, "radix": False, "window": True},
    {"page_size": 2, "pages": 700, "need_sort": True, "radix": True, "window": False},
]
"""Pools of a few requests' size, so that there is never much room."""

WEIGHTS = {"step": 60, "start": 16, "finish": 6, "evict": 6, "defrag": 12}


def live(world: World, steps: int) -> None:
    """So many steps that did something; each is counted in world.done. Where nothing has room, a request ends."""
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    taken = idle = 0
    while taken < steps:
        [name] = world.draw.choices(names, weights)
        try:
            did = getattr(world, name)()
        except Exception as e:
            raise AssertionError(f"step {taken} ({name}) of page size {world.page_size}: {e}") from e
        if did:
            world.done[name] += 1
            taken, idle = taken + 1, 0
        elif (idle := idle + 1) > 20:
            world.done["finish"] += world.finish()
            idle = 0


def run(steps: int, seed: int = 0, interpret: bool = False) -> dict[str, int]:
    """So many steps shared among WORLDS; how often each kind was taken."""
    total: Counter[str] = Counter()
    for i, options in enumerate(WORLDS):
        world = World(seed=seed * len(WORLDS) + i, **options)
        with nullcontext() if interpret else plain():
            live(world, -(-steps // len(WORLDS)))
        total += world.done
    return dict(total)


@contextmanager
def plain() -> Iterator[None]:
    """Plain PyTorch in the place of the three Triton kernels on the way."""
    from sglang.srt.mem_cache import allocator
    from sglang.srt.server_args import get_global_server_args
    from sglang.srt.speculative import spec_utils

    class Launch:
        def __init__(self, run: Any) -> None:
            self.run = run

        def __getitem__(self, grid: Any) -> Any:
            return self.run

    def extend(before: Any, after: Any, last: Any, free: Any, out: Any, bs: int, page: int) -> None:
        allocator.alloc_extend_naive(before, after, last, free, out, page, "cpu")

    def assign(rows: Any, table: Any, begin: Any, end: Any, slots: Any, width: int, bs: int) -> None:
        at = 0
        for row, a, b in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True):
            table[row, a:b] = slots[at : at + b - a].int()
            at += b - a

    stock = allocator.alloc_extend_kernel, spec_utils.assign_req_to_token_pool
    allocator.alloc_extend_kernel, spec_utils.assign_req_to_token_pool = Launch(extend), Launch(assign)
    get_global_server_args().attention_backend = "torch_native"  # get_last_loc asks
    try:
        yield
    finally:
        allocator.alloc_extend_kernel, spec_utils.assign_req_to_token_pool = stock


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interpret", action="store_true", help="run SGLang's Triton kernels, interpreted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    print(run(options.steps, options.seed, options.interpret), f"in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
