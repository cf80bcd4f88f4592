# SPDX-License-Identifier: Apache-2.0
"""One measurement: draw the step, run it, check it, time it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from treeverify.attention import abi, cases, paths, reference
from treeverify.attention.plan import LATENT, workspace_floats

from . import roofline
from .jobs import FP8, PLANNED, UNEVEN, Job
from .peers import PEERS, build_of
from .problems import Problems, visible_pairs
from .shapes import BASELINES, BS, HEADS, MORE, RAGGED, N
from .store import Row, rounded
from .timer import Timer, TooSlow

_PATHS = {"portable": abi.PATH_PORTABLE, "narrow": abi.PATH_NARROW, "hopper": abi.PATH_HOPPER}
PATHS = {**_PATHS, **{name + FP8: path for name, path in _PATHS.items()}}
"""Ours, as mla_verify's `path`. narrow: on a Hopper card, the shapes that sm_120 runs. With FP8, on an e4m3 pool."""

CHECKED_PAIRS = {True: 2 * 10**8, False: 2 * 10**7}
"""Of a step with more (row, position) pairs a few tokens are checked only; by whether peers are timed on the shape."""

TOLERANCE = 1e-2
"""Worst row's relative L2 error past which an output is called wrong: several times bf16's rounding."""


class Bench:
    """Measures jobs on one card.

    Args:
        ceilings: what ceilings.measure gave, or {} for none.
        card: recorded, and part of a row's key.
    """

    def __init__(self, problems: Problems, timer: Timer, ceilings: Mapping[str, float], card: str) -> None:
        self.problems, self.timer, self.ceilings, self.card = problems, timer, ceilings, card
        self._expected: tuple[object, torch.Tensor] | None = None

    def is_current(self, row: Row) -> bool:
        """Whether a row is of this card and of the code that is here now."""
        return bool(row["card"] == self.card and row["build"] == build(row["impl"]))

    def label(self, job: Job) -> Row:
        """The fields that tell the row of a job: store.KEY."""
        return {
            "impl": job.impl, **job.shape._asdict(), "slots": job.slots, "batch": job.batch, "pool": job.pool,
            "card": self.card, "build": build(job.impl),
        }  # fmt: skip

    def __call__(self, job: Job) -> Row:
        """The row of a job. It has `us`; or `skipped` where a run takes too long; or `failed`."""
        row = self.label(job)
        try:
            row |= self._measure(job)
        except TooSlow as e:
            row["skipped"] = str(e)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            row["skipped"] = "not enough memory"
        except Exception as e:  # a peer that fails must not cost the run: the row says why
            row["failed"] = repr(e)[:300]
        return rounded(row)

    def _measure(self, job: Job) -> Row:
        ours = job.impl in PATHS
        case = self._draw(job)
        run = case.run if ours else PEERS[job.impl].make(self.problems, case, job.shape)
        row = self._check(job, case, run)
        row["us"] = self.timer(run)
        if ours:
            splits = {"splits": case.splits} if case.splits else {"nsplit": case.nsplit, "taper": case.taper}
            row |= {**splits, "workspace_bytes": workspace_bytes(case)}
        if ours and self.ceilings:
            kv_bytes = case.pool.element_size()
            step = roofline.work(sum(case.kv_lens), job.shape.query_rows, visible_pairs(case), kv_bytes)
            rate = roofline.RATE[job.impl.removesuffix(FP8)]
            row["roofline_us"] = roofline.bound_us(step, self.ceilings, rate)
            row["roofline"] = row["roofline_us"] / row["us"]
        return row

    def _draw(self, job: Job) -> cases.Case:
        shape = job.shape
        chain = job.impl in PEERS and PEERS[job.impl].chain
        prefixes = RAGGED if job.batch in (UNEVEN, PLANNED) else [shape.kv] * shape.bs
        pool = None if job.pool is None else job.pool * shape.kv_tokens
        return self.problems.draw(
            prefixes, shape.n, shape.heads, slots=job.slots, chain=chain, pool_slots=pool,
            path=PATHS.get(job.impl, abi.PATH_AUTO), planned=job.batch == PLANNED, kv_dtype=kv_dtype(job.impl),
        )  # fmt: skip

    def _check(self, job: Job, case: cases.Case, run: Callable[[], torch.Tensor]) -> Row:
        """Error against float64: of the whole output where the step is small, else of a few tokens of it."""
        whole = visible_pairs(case) <= CHECKED_PAIRS[job.shape in BASELINES + MORE]
        step = (job.shape, job.slots, job.batch, job.pool, case.mask_kind, case.pool.dtype)
        if self._expected is None or self._expected[0] != step:
            self._expected = (step, case.expected() if whole else token_reference(case, sample(case)))
        out = run()
        error = reference.worst_row_error(out if whole else out[sample(case)], self._expected[1])
        row: Row = {"error": error} if whole else {"error": error, "checked_tokens": len(sample(case))}
        return row if error <= TOLERANCE else {**row, "wrong": True}


def sample(case: cases.Case) -> list[int]:
    """A few tokens: the first, the last, and one between."""
    tokens = case.q_nope.shape[0]
    return sorted({0, tokens // 2, tokens - 1})


def token_reference(case: cases.Case, tokens: Sequence[int]) -> torch.Tensor:
    """Attention of single tokens in float64, [len(tokens), H, 512]."""
    starts = [0, *itertools.accumulate(case.kv_lens)]
    out = []
    for token in tokens:
        b, i = divmod(token, case.n)
        key = case.pool[case.kv_indices[starts[b] : starts[b + 1]].long(), 0].double()
        query = torch.cat([case.q_nope[token], case.q_pe[token]], -1).double()
        score = query @ key.T * case.sm_scale
        score[:, len(key) - case.n :].masked_fill_(~case.visible[b, i], float("-inf"))
        out.append(score.softmax(-1) @ key[:, :LATENT])
    return torch.stack(out)


def kv_dtype(impl: str) -> torch.dtype:
    """What the pool holds that an implementation reads."""
    return torch.float8_e4m3fn if impl.endswith(FP8) else torch.bfloat16


def workspace_bytes(case: cases.Case) -> int:
    """Bytes of partial results the step needs; 0 where the output is written directly."""
    floats = case.workspace.numel()
    return 0 if floats <= 1 else floats * 4


def largest_workspace(device: torch.device, impl: str) -> int:
    """Bytes of workspace of the bucket that needs most, of all batch sizes, heads and widths within the sweep's."""
    target = paths.target(device, PATHS[impl], kv_dtype(impl))
    buckets = itertools.product(range(1, max(BS) + 1), range(1, max(N) + 1), HEADS)
    return max(4 * workspace_floats(bs, n, heads, bs * target.cut(bs, n, heads).splits) for bs, n, heads in buckets)


def build(impl: str) -> str:
    """Tells one build of the code of an implementation from another."""
    return library_build() if impl in PATHS else build_of(impl)


def library_build() -> str:
    """What tells one build of the kernels from another: the head of the library's SHA-256."""
    path = abi.library_path()
    if not path.exists():
        return "no library"
    stat = path.stat()
    return _digest(str(path), stat.st_mtime_ns, stat.st_size)


_digests: dict[tuple[str, int, int], str] = {}


def _digest(path: str, mtime: int, size: int) -> str:
    at = (path, mtime, size)
    if at not in _digests:
        with open(path, "rb") as file:
            _digests[at] = hashlib.sha256(file.read()).hexdigest()[:12]
    return _digests[at]
