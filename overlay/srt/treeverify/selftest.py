# SPDX-License-Identifier: Apache-2.0
"""Checks the kernels on this machine's GPU against the float64 reference, then times a few shapes.

    python -m sglang.srt.treeverify.selftest [--json] [--buckets 1,8,9 8,8,64 ...] [--no-bench]

A bucket is batch size, heads of a rank, draft tokens a request: what a captured graph has fixed. Each is run on every
path the card has, in every index layout, mask form and dtype, eager and replayed from a graph with other data. Exit 0
where all agree, 1 where one does not, 2 where there is no GPU. Owners of cards nobody has measured: please send the
--json output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .attention import abi, cases, ops, paths, reference
from .attention.plan import KEY_DIM, mask_words
from .ddtree import selftest as trees
from .kv import selftest as moves

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 5e-3, torch.float8_e5m2: 5e-3}
"""Worst row's relative L2 error, by what the KV pool holds; of fp8 against a reference on the same fp8."""

BUCKETS = ["1,8,9", "1,16,64", "2,8,65", "4,128,5", "8,64,9", "3,1,33", "1,8,1"]
PREFIXES = [700, 0, 1, 63, 4097, 128, 2000, 31]
TIMED = [(1, 8, 9, 1024), (1, 8, 9, 32768), (1, 8, 9, 200000), (1, 64, 64, 32768), (8, 8, 9, 32768)]
BENCHED = (torch.bfloat16, torch.float8_e4m3fn)
SEED = 0


class Bucket(NamedTuple):
    """A captured batch size."""

    bs: int
    heads: int
    n: int


class Variant(NamedTuple):
    """One way to hand a verify step to the kernels."""

    name: str
    arguments: dict[str, Any]


VARIANTS = [
    Variant("packed mask", {}),
    Variant("FULL bool mask, int64 indices", {"mask_kind": abi.MASK_FULL, "index_dtype": torch.int64}),
    Variant("FULL uint8 mask, prefix and out_cache_loc apart", {
        "mask_kind": abi.MASK_FULL, "mask_dtype": torch.uint8, "two_source": True, "qo_dtype": torch.int64}),
    Variant("draft-only mask", {"mask_kind": abi.MASK_QLEN}),
    Variant("no mask", {"mask_kind": abi.MASK_NONE}),
    Variant("padded requests, stray rows", {"padded": 2, "extra_tokens": 3}),
    Variant("planned splits", {"plan": True}),
    Variant("logit cap", {"logit_cap": 20.0}),
]  # fmt: skip


def check(bucket: Bucket, variant: Variant, dtype: torch.dtype, target: paths.Target) -> dict[str, Any]:
    """One row: errors against the reference, bits against the graph, and that the mask matters."""
    prefixes = [PREFIXES[i % len(PREFIXES)] for i in range(bucket.bs)]
    how = {**cases.pool_of(dtype), "path": target.path, "seed": SEED, **variant.arguments}
    case = cases.make_case(prefixes, bucket.n, bucket.heads, **how)
    expected = case.expected()
    eager = case.run().clone()
    error = reference.worst_row_error(eager, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    case.poison()
    graph.replay()
    same_bits = bool(torch.equal(eager, case.out))
    case.visible = reference.causal(bucket.n, eager.device).expand_as(case.visible)
    chain = reference.worst_row_error(eager, case.expected())
    masked = variant.arguments.get("mask_kind") != abi.MASK_NONE and bucket.n > 2
    ok = error <= TOLERANCE[dtype] and same_bits and (not masked or chain > 10 * TOLERANCE[dtype])
    return {
        **bucket._asdict(), "path": target.name, "dtype": _name(dtype), "variant": variant.name,
        "nsplit": case.nsplit, "taper": case.taper, "planned_splits": case.splits,
        "error": error, "error_if_causal": chain if masked else None, "replay_same_bits": same_bits, "ok": ok,
    }  # fmt: skip


def check_prep(bucket: Bucket) -> dict[str, Any]:
    """One row: mla_prep on the GPU against its CPU implementation, padded rows with stale request indices included."""
    generator = torch.Generator().manual_seed(SEED)
    bs, n, raw = bucket.bs + 1, bucket.n, bucket.bs
    prefixes = [PREFIXES[i % len(PREFIXES)] for i in range(raw)] + [1]
    width = max(prefixes) + n
    table = torch.randint(0, 1 << 20, (bs + 3, width), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 3, generator=generator)[:bs]
    visible = cases.random_trees(raw, n, generator, "cpu")
    full = cases.byte_mask(visible, prefixes[:raw], torch.bool)
    outputs = []
    for device in ("cpu", "cuda"):
        kv_indptr = torch.full((bs + 1,), -1, dtype=torch.int32, device=device)
        kv_indices = torch.full((bs * width,), -1, dtype=torch.int32, device=device)
        packed = torch.full((bs * n * mask_words(n),), -1, dtype=torch.int64, device=device)
        lens = torch.tensor(prefixes, dtype=torch.int32, device=device)
        ops.mla_prep(
            table.to(device), rows.to(device), lens, full.to(device), abi.MASK_FULL, raw, bs, n,
            kv_indptr, kv_indices, packed,
        )  # fmt: skip
        used = int(kv_indptr[bs])
        outputs.append((kv_indptr.cpu(), kv_indices[:used].cpu(), packed[: raw * n * mask_words(n)].cpu()))
    ok = all(torch.equal(a, b) for a, b in zip(*outputs, strict=False))
    return {**bucket._asdict(), "variant": "prep", "ok": ok}


def timed(bs: int, heads: int, n: int, kv: int, target: paths.Target, dtype: torch.dtype) -> dict[str, Any]:
    """One row: median microseconds of a replay with a cold L2, and the KV bytes per second that means."""
    row = {"bs": bs, "heads": heads, "n": n, "kv": kv, "path": target.name, "dtype": _name(dtype)}
    need = bs * (kv + n) * KEY_DIM * dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    if bs * (kv + n) * KEY_DIM * 6 > free:  # drawn as float32
        return {**row, "us": None, "skipped": "not enough free memory"}
    case = cases.make_case([kv] * bs, n, heads, path=target.path, seed=SEED, **cases.pool_of(dtype))
    us = _median_us(case.run)
    return {**row, "nsplit": case.nsplit, "us": us, "kv_gbs": need / us / 1e3}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _median_us(run: Callable[[], object], repeats: int = 20) -> float:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def served(targets: list[paths.Target]) -> list[tuple[paths.Target, list[torch.dtype]]]:
    """The pools that each path reads here."""
    device = torch.device("cuda")
    reading = {dtype: {t.path for t in paths.testable(device, dtype)} for dtype in TOLERANCE}
    return [(target, [dtype for dtype in TOLERANCE if target.path in reading[dtype]]) for target in targets]


def rows(buckets: list[Bucket], targets: list[paths.Target]) -> Iterator[dict[str, Any]]:
    """Every check of every bucket, then those of draft trees and of moved KV."""
    for bucket in buckets:
        yield check_prep(bucket)
        for target, dtypes in served(targets):
            for dtype in dtypes:
                for variant in VARIANTS:
                    yield check(bucket, variant, dtype, target)
    yield from trees.rows(SEED)
    yield from moves.rows(SEED)


def environment() -> dict[str, str | None]:
    """What a report needs to be understood elsewhere."""
    major, minor = torch.cuda.get_device_capability()
    command = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)  # nobody else has our folders
    return {
        "card": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", "driver": _driver(),
        "cuda": torch.version.cuda, "torch": torch.__version__, "sglang": _version("sglang"),
        "flashinfer": _version("flashinfer-python"), "command": command, "seed": str(SEED),
        "commit": os.environ.get("TREEVERIFY_COMMIT"),
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")[0] or None
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="selftest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--buckets", nargs="+", default=BUCKETS, metavar="BS,HEADS,N", help="default: %(default)s")
    parser.add_argument("--no-bench", action="store_true", help="check only")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("selftest: no CUDA GPU is visible to PyTorch; run it on the machine that serves", file=sys.stderr)
        return 2
    try:
        buckets = [Bucket(*map(int, text.split(","))) for text in args.buckets]
    except (TypeError, ValueError):
        parser.error("a bucket is batch size, heads and draft tokens, such as 1,8,9")
    targets = paths.testable(torch.device("cuda"))
    if not args.json:
        print(f"{torch.cuda.get_device_name()} takes the {targets[0].name} path", flush=True)
    last = {target.name: _name(dtypes[-1]) for target, dtypes in served(targets)}
    done = []
    for row in rows(buckets, targets):
        done.append(row)
        if not args.json and not row["ok"]:
            print(f"WRONG {row}", flush=True)
        ends = row["variant"] == VARIANTS[-1].name and row.get("dtype") == last.get(row.get("path", ""))
        if not args.json and ends:
            mine = [r for r in done if all(r.get(k) == row[k] for k in ("bs", "heads", "n", "path"))]
            worst = max(r["error"] for r in mine)
            shape = f"bs {row['bs']:3} heads {row['heads']:3} n {row['n']:3}"
            print(f"{shape} {row['path']:8}: {len(mine)} checks, worst {worst:.1e}", flush=True)
    timing = [(target, dtype) for target, dtypes in served(targets) for dtype in dtypes if dtype in BENCHED]
    bench = [] if args.no_bench else [timed(*shape, *one) for shape in TIMED for one in timing]
    wrong = [row for row in done if not row["ok"]]
    if args.json:
        report = {**environment(), "path": targets[0].name, "ok": not wrong, "rows": done, "bench": bench}
        print(json.dumps(report, indent=1))
    else:
        for row in bench:
            time = (
                "skipped: not enough memory" if row["us"] is None else f"{row['us']:9.1f} us {row['kv_gbs']:7.0f} GB/s"
            )
            shape = f"bs {row['bs']:2} heads {row['heads']:3} n {row['n']:3} kv {row['kv']:7}"
            print(f"{shape} {row['path']:8} {row['dtype']:13}: {time}")
        print(f"{len(done) - len(wrong)} of {len(done)} checks agree with the reference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
