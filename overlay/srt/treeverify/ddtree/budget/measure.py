# SPDX-License-Identifier: Apache-2.0
"""The cost curve, timed at start-up: the captured graphs, replayed over requests of many lengths.

Requests are made up: rows of req_to_token point to slots of the pool, which is still empty, each to slots of its own,
so that nothing is read twice; their tokens are drawn at random, so that experts are chosen as variously as they can be.
Draft KV goes to the dummy slot 0. The rows are put back.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .curve import Costs, Curve

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

FIRST_CONTEXT, CONTEXT_FACTOR = 1024, 4
MOST_REPEATS = 5
LIMIT_S = 8.0
"""About as long as all replays together may take."""

Timer = Callable[[Callable[[], Any], int], float]
"""Seconds of a launch: their median over so many, after one that does not count."""


def measure(
    runners: Mapping[int, Any], model_runner: ModelRunner, agree: Callable[[Any], Any], timer: Timer | None = None
) -> Curve:
    """Times the graphs of each width.

    Args:
        runners: CudaGraphRunners of the target by width; batch sizes that all of them captured are timed.
        model_runner: the target's; nothing is served yet.
        agree: gives every rank rank 0's value.
        timer: None for CUDA events.
    """
    widths = tuple(sorted(runners))
    timer = timer or cuda_seconds
    captured = tuple(sorted(set.intersection(*(set(runner.capture_bs) for runner in runners.values()))))
    bench = _Bench(model_runner, widths[-1])
    contexts = {bs: bench.contexts(bs) for bs in captured}

    def timed(width: int, bs: int, context: int, repeats: int) -> float:
        runner = runners[width]
        batch = bench.batch(bs, width, context)
        runner.replay_prepare(batch)
        return timer(lambda: runner.replay(batch, skip_attn_backend_init=True), repeats)

    largest = captured[-1]
    with bench.requests(largest, contexts[largest][-1]):
        longest = agree(timed(widths[-1], largest, contexts[largest][-1], 1))
    sizes, repeats = schedule({bs: len(contexts[bs]) * len(widths) for bs in captured}, longest)
    costs = {}
    for bs in sizes:
        rows: list[list[float]] = [[] for _ in widths]
        for context in contexts[bs]:
            with bench.requests(bs, context):
                for row, width in zip(rows, widths, strict=True):
                    row.append(timed(width, bs, context, repeats))
        costs[bs] = Costs.of(contexts[bs], agree(rows))
    return Curve(widths, captured, costs)


def schedule(cells: Mapping[int, int], longest: float) -> tuple[list[int], int]:
    """Batch sizes to measure and replays that count in each cell, so that all fits into LIMIT_S.

    Args:
        cells: of each captured batch size.
        longest: seconds of the longest replay; a mean one is taken for half of it.
    """
    sizes = sorted(cells)
    while True:
        replays = LIMIT_S / max(sum(cells[bs] for bs in sizes) * longest / 2, 1e-9)
        if replays >= 2 or len(sizes) <= 2:
            return sizes, max(min(int(replays) - 1, MOST_REPEATS), 1)
        sizes = sorted({sizes[0], *sizes[::-1][::2]})


def contexts_up_to(longest: int) -> tuple[int, ...]:
    """1k, 4k, 16k, ... and the longest itself, where it lies well past the last of them."""
    found = []
    context = FIRST_CONTEXT
    while context <= longest:
        found.append(context)
        context *= CONTEXT_FACTOR
    if not found or longest >= 2 * found[-1]:
        found.append(max(longest, 1))
    return tuple(found)


class _Bench:
    """Made-up requests in the pools of a target."""

    def __init__(self, model_runner: ModelRunner, widest: int) -> None:
        self._runner, self._widest = model_runner, widest
        self._table = model_runner.req_to_token_pool.req_to_token
        self._generator = torch.Generator().manual_seed(0)  # the same tokens on every rank

    def contexts(self, bs: int) -> tuple[int, ...]:
        """Lengths that `bs` requests can have together."""
        slots = self._runner.token_to_kv_pool.size // bs
        return contexts_up_to(min(slots, self._table.shape[1]) - self._widest)

    @contextlib.contextmanager
    def requests(self, bs: int, context: int) -> Iterator[None]:
        """Rows 1 to `bs` hold slots of their own for the while."""
        mine = self._table[1 : bs + 1, : context + self._widest]
        before = mine.clone()
        slots = torch.arange(1, mine.numel() + 1, dtype=mine.dtype, device=mine.device)
        mine.copy_(slots.view(mine.shape))
        try:
            yield
        finally:
            mine.copy_(before)

    def batch(self, bs: int, n: int, context: int) -> Any:
        """Their verify step: a real ForwardBatch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput

        runner, device = self._runner, self._table.device
        vocabulary = runner.model_config.vocab_size
        tokens = torch.randint(vocabulary, (bs * n,), generator=self._generator).to(device)
        positions = torch.arange(context, context + n, device=device).repeat(bs)
        lengths = torch.full((bs,), context, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=tokens,
            req_pool_indices=torch.arange(1, bs + 1, device=device),
            seq_lens=lengths.to(device),
            seq_lens_cpu=lengths,
            seq_lens_sum=bs * context,
            out_cache_loc=torch.zeros(bs * n, dtype=torch.int64, device=device),
            positions=positions,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            spec_algorithm=runner.spec_algorithm,
            spec_info=DFlashVerifyInput(draft_token=tokens, positions=positions, draft_token_num=n),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            num_token_non_padded=torch.tensor(bs * n, dtype=torch.int32, device=device),
        )


def cuda_seconds(launch: Callable[[], Any], repeats: int) -> float:
    """A Timer by CUDA events. The device never waits for the host between launches."""
    events: Sequence[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    launch()
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1e3
