#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random verify steps against the float64 reference: any batch, heads, draft width, lengths, layout, mask, dtype, path.

    python3 scripts/fuzz_verify.py --out results/fuzz.json             # 20 000 cases, or --budget-s of them
    python3 scripts/fuzz_verify.py --out … --seed 7 --only 1234        # one case again
    python3 scripts/fuzz_verify.py --out … --device cpu --cases 50     # dry run: the reference answers itself

Case i is drawn from SEED and i alone, so every failure can be run again by its number. Cases run in batches of 200;
what a batch found is kept in OUT with .jsonl for .json, and a run that was cut off, or whose budget ended (exit 3),
goes on with the next batch. First of all the masks of some cases are dropped, and the check must find those outputs
wrong. Exit 1 where a case fails: its arguments and its command are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench.ddtree.rows import digest  # noqa: E402
from bench.store import Row, Store, rounded  # noqa: E402
from treeverify.attention import abi, cases, paths, plan, reference  # noqa: E402
from treeverify.selftest import TOLERANCE, environment  # noqa: E402

CASES, BATCH, OUT_OF_TIME = 20_000, 200, 3
KEY = ("seed", "batch", "card", "build")
WORK, PARTIALS, POSITIONS = 6_000_000, 1 << 26, 60_000
"""Most (query row, KV position) pairs of a case, floats of its workspace, KV positions."""

CONTROLS, CONTROL_FACTOR = 20, 10
"""Cases whose masks are dropped first; their error must exceed the limit so many times."""

WIDTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 200, 255, 256)
HEADS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 127, 128)
LENGTHS = (0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 1023, 1024, 4095, 4096, 4097)


class Drawn(NamedTuple):
    """A case that is not made yet."""

    prefixes: list[int]
    n: int
    heads: int
    how: dict[str, Any]
    """Further arguments of cases.make_case."""


def draw(seed: int, number: int, targets: dict[torch.dtype, list[int]]) -> Drawn:
    """Case `number`.

    Args:
        targets: paths that read a pool of each dtype here.
    """
    chosen = random.Random(f"{seed} {number}")
    pool = chosen.choice(list(targets))
    n = chosen.choice(WIDTHS) if chosen.random() < 0.3 else chosen.randint(1, 20)
    heads = chosen.choice(HEADS) if chosen.random() < 0.7 else chosen.randint(1, max(HEADS))
    heads = min(heads, max(1, WORK // (n * n)))
    bs = chosen.choice((1, 1, 1, 2, 2, 3, 4, 5, 8, 16, 32))
    prefixes: list[int] = []
    for _ in range(bs):
        longest = chosen.choice((100, 600, 600, 5_000, 50_000))
        length = chosen.choice(LENGTHS) if chosen.random() < 0.4 else chosen.randrange(longest)
        positions = sum(prefixes) + length + bs * n
        prefixes.append(length if positions <= POSITIONS and n * heads * positions <= WORK else 0)
    while len(prefixes) > 1 and n * heads * (sum(prefixes) + len(prefixes) * n) > WORK:
        prefixes.pop()
    two_source = chosen.random() < 0.4
    padded = 0 if two_source else chosen.choice((0, 0, 1, 3))
    how: dict[str, Any] = {
        **cases.pool_of(pool),
        "seed": chosen.randrange(1 << 31),
        "mask_kind": chosen.choice((abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN)),
        "mask_dtype": chosen.choice((torch.bool, torch.uint8)),
        "two_source": two_source,
        "index_dtype": chosen.choice((torch.int32, torch.int64)),
        "qo_dtype": chosen.choice((torch.int32, torch.int64)),
        "path": chosen.choice(targets[pool]),
        "padded": padded,
        "extra_tokens": chosen.choice((0, 0, 1, 5)),
        "contiguous_slots": chosen.random() < 0.2,
        "logit_cap": chosen.choice((0.0, 0.0, 0.0, 5.0)),
        "plan": chosen.random() < 0.25,
    }
    if pool in paths.FP8:
        how["k_scale"] = chosen.choice((1.0, 0.7, 0.03, 3.0))
    one = plan.workspace_floats(1, n, heads, 1) * (len(prefixes) + padded)
    most = min(plan.MAX_SPLITS, PARTIALS // max(one, 1))
    if most > 1 and chosen.random() < 0.5:
        how["nsplit"] = chosen.randint(1, chosen.choice((most, min(most, 8))))
        how["taper"] = 0 if how["plan"] else chosen.randint(0, min(how["nsplit"] - 1, plan.MAX_TAPER))
    return Drawn(prefixes, n, heads, how)


def make(drawn: Drawn, device: str) -> cases.Case:
    """The tensors."""
    return cases.make_case(drawn.prefixes, drawn.n, drawn.heads, device=device, **drawn.how)


def run_one(drawn: Drawn, device: str) -> tuple[str, str, float, float]:
    """Path, dtype of the pool, error and limit of a case."""
    case = make(drawn, device)
    error = reference.worst_row_error(case.run(), case.expected())
    pool = case.pool.dtype
    name = paths.target(torch.device(device), case.path, pool).of(drawn.n, drawn.heads).name
    return name, str(pool).removeprefix("torch."), error, TOLERANCE[pool]


def control(seed: int, targets: dict[torch.dtype, list[int]], device: str) -> int:
    """Drops the masks of CONTROLS cases.

    Raises:
        AssertionError: the check did not notice one.
    """
    done, number = 0, 0
    while done < CONTROLS:
        drawn = draw(seed, number, targets)
        number += 1
        if drawn.how["mask_kind"] == abi.MASK_NONE or drawn.n < 5 or max(drawn.prefixes) > 500:
            continue
        case = make(drawn, device)
        expected, case.mask_kind = case.expected(), abi.MASK_NONE
        error, limit = reference.worst_row_error(case.run(), expected), TOLERANCE[case.pool.dtype]
        assert error > CONTROL_FACTOR * limit, f"case {number - 1}: a dropped mask is off by {error:.2e} only"
        done += 1
    return done


def batch(seed: int, first: int, count: int, targets: dict[torch.dtype, list[int]], device: str) -> Row:
    """Runs `count` cases; its row has the worst error of each path and dtype, and the failures."""
    worst: dict[str, list[float]] = {}
    failures = []
    for number in range(first, first + count):
        drawn = draw(seed, number, targets)
        path, dtype, error, limit = run_one(drawn, device)
        found = worst.setdefault(f"{path} {dtype}", [0, 0.0, limit])
        found[0], found[1] = found[0] + 1, max(found[1], error)
        if not error <= limit:
            failures.append({"case": number, "error": repr(error), "limit": limit, "drawn": repr(drawn)})
            print(f"FAILED: case {number}, error {error:.2e} of {limit:.0e}: {drawn}\n  again: python3 "
                  f"scripts/fuzz_verify.py --out again.json --seed {seed} --only {number}", flush=True)  # fmt: skip
    return {"cases": count, "worst": worst, "failures": failures}


def summary(rows: Iterable[Row]) -> list[Row]:
    """One row a path and dtype."""
    merged: dict[str, Row] = {}
    for row in rows:
        for name, (count, error, limit) in row["worst"].items():
            path, dtype = name.split()
            one = merged.setdefault(name, {"path": path, "dtype": dtype, "cases": 0, "worst": 0.0, "tolerance": limit})
            one["cases"], one["worst"] = one["cases"] + count, max(one["worst"], error)
    return [rounded(merged[name]) for name in sorted(merged)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 0 where all cases agree, 1 where one fails, 3 where the budget ended first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, help="default: drawn, and printed; that of OUT where a run goes on")
    parser.add_argument("--only", type=int, help="one case by its number; writes nothing")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible to PyTorch; --device cpu is a dry run")
    begin, where = time.time(), environment() if args.device == "cuda" else {"card": "cpu", "torch": torch.__version__}
    store, device = Store(args.out, KEY), torch.device(args.device)
    targets = {dtype: sorted({t.path for t in paths.testable(device, dtype)}) for dtype in TOLERANCE}
    if args.only is not None:
        drawn = draw(args.seed or 0, args.only, targets)
        print(drawn, *run_one(drawn, args.device))
        return 0
    label = {"card": where["card"], "build": _build(), "size": min(BATCH, args.cases)}
    seed = args.seed if args.seed is not None else _seed_of(store, label)
    print(f"seed {seed}, {control(seed, targets, args.device)} dropped masks found", flush=True)
    code = 0
    for number in range(-(-args.cases // BATCH)):
        row = {"seed": seed, "batch": number, **label}
        if store.done(row):
            continue
        if time.time() - begin > args.budget_s:
            code = OUT_OF_TIME
            break
        count = min(BATCH, args.cases - number * BATCH)
        store.add(row | batch(seed, number * BATCH, count, targets, args.device))
    rows = [row for row in store.rows.values() if row["seed"] == seed and all(row[k] == label[k] for k in label)]
    done, failed = sum(row["cases"] for row in rows), sum(len(row["failures"]) for row in rows)
    header = {**where, "commit": args.commit, "seed": seed, "cases": done, "wanted": args.cases, "failed": failed}
    store.write_report(header, summary(rows), failures=[failure for row in rows for failure in row["failures"]])
    print(f"{done} of {args.cases} cases, {failed} failed, seed {seed}, {time.time() - begin:.0f} s", flush=True)
    return 1 if failed else code


def _build() -> str:
    """Tells one build of the kernels from another."""
    library = Path(os.environ.get("TREEVERIFY_LIBRARY", ROOT / "overlay" / "srt" / "treeverify"))
    return digest(library.parent if library.is_file() else library)


def _seed_of(store: Store, label: Row) -> int:
    """The seed that a run began with on this card and build, else a new one."""
    seeds = [row["seed"] for row in store.rows.values() if all(row.get(key) == label[key] for key in label)]
    return int(seeds[-1]) if seeds else random.SystemRandom().randrange(1 << 31)


if __name__ == "__main__":
    sys.exit(main())
