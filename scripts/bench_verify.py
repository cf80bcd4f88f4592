#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times mla_verify beside the kernels SGLang has, in one run.

    python3 scripts/bench_verify.py --out results/verify.json [--shapes 1,8,9,200000 ...] [--peers triton,fa2]

Each number is the median of CUDA-graph replays with the L2 flushed before each. Ceilings (read, copy, matrix product)
are measured first, in the same process. `triton` is SGLang's extend kernel with the tree mask, `fa2` and `fa3`
FlashInfer's MLA wrapper on a causal chain, its plan() not counted. The row of a peer that fails says why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "overlay" / "srt"))

from treeverify.attention import abi, cases, reference  # noqa: E402
from treeverify.attention.plan import KEY_DIM, LATENT  # noqa: E402
from treeverify.selftest import environment  # noqa: E402

SHAPES = ["1,8,9,1024", "1,8,9,32768", "1,8,9,200000", "1,64,9,32768", "8,8,9,32768", "8,64,9,32768"]
SEED = 0


class Timer:
    """Median microseconds of a captured function, L2 flushed before each replay."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, run: Callable[[], object], repeats: int = 20) -> float:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.zero_()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return float(statistics.median(times))


def ceilings(timer: Timer) -> dict[str, float]:
    """GB/s of a large read and copy (both ways counted), TFLOP/s of a bf16 product of random matrices."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    wide = x.view(torch.float32)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "read_gbs": x.nbytes / timer(wide.sum) / 1e3,
        "copy_gbs": 2 * x.nbytes / timer(lambda: torch.add(x, 0, out=y)) / 1e3,
        "matmul_tflops": 2 * 8192**3 / timer(lambda: m @ m) / 1e6,
    }


def triton_extend(case: cases.Case, prefix: int) -> Callable[[], torch.Tensor]:
    """SGLang's Triton verify: one program a head, prefix by kv_indices, draft rows from k and v, FULL mask."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    bs, n = case.bs, case.n
    slots = case.kv_indices.long().view(bs, prefix + n)
    q = torch.cat([case.q_nope, case.q_pe], -1).contiguous()
    k = case.pool[slots[:, prefix:].reshape(-1)]
    v, out = k[..., :LATENT].contiguous(), torch.empty_like(case.out)
    kv_indptr = torch.arange(bs + 1, device="cuda", dtype=torch.int32) * prefix
    mask = cases.byte_mask(case.visible, [prefix] * bs, torch.bool)
    mask_indptr = torch.arange(bs + 1, device="cuda") * (n * (prefix + n))
    qo, before = case.qo_indptr.long(), slots[:, :prefix].reshape(-1).contiguous()
    pool_v = case.pool[..., :LATENT]

    def run() -> torch.Tensor:
        extend_attention_fwd(
            q, k, v, out, case.pool, pool_v, qo, kv_indptr, before, mask, True, mask_indptr, n, 1.0, 1.0, case.sm_scale
        )
        return out

    return run


def flashinfer_mla(case: cases.Case, prefix: int, backend: str) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged MLA on the same slots, causal: it has no tree mask."""
    import flashinfer

    bs, heads = case.bs, case.q_nope.shape[1]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), backend=backend
    )
    kv_len = torch.full((bs,), prefix + case.n, dtype=torch.int32, device="cuda")
    dtype = case.pool.dtype
    wrapper.plan(
        case.qo_indptr,
        case.kv_indptr,
        case.kv_indices,
        kv_len,
        heads,
        LATENT,
        KEY_DIM - LATENT,
        1,
        True,
        case.sm_scale,
        dtype,
        dtype,
    )
    q_nope, q_pe, out = case.q_nope.contiguous(), case.q_pe.contiguous(), torch.empty_like(case.out)
    ckv, kpe = case.pool[..., :LATENT], case.pool[..., LATENT:]
    return lambda: wrapper.run(q_nope, q_pe, ckv, kpe, out=out)


class Shape(NamedTuple):
    """One row of the bench."""

    bs: int
    heads: int
    n: int
    kv: int


def peer_run(peer: str, tree: cases.Case, chain: cases.Case, kv: int) -> tuple[cases.Case, Callable[[], torch.Tensor]]:
    """The step a peer is given, and how to run it: Triton gets the tree, FlashInfer the chain."""
    return (tree, triton_extend(tree, kv)) if peer == "triton" else (chain, flashinfer_mla(chain, kv, peer))


def bench_shape(
    timer: Timer, pool: torch.Tensor, shape: Shape, peers: list[str], limits: dict[str, float]
) -> dict[str, Any]:
    """One row of the results: times, errors against the reference, ratios, fractions of the roofline."""
    bs, heads, n, kv = shape
    tree = cases.make_case([kv] * bs, n, heads, pool=pool, seed=SEED)
    chain = cases.make_case([kv] * bs, n, heads, pool=pool, seed=SEED, mask_kind=abi.MASK_NONE)
    row: dict[str, Any] = {**shape._asdict(), "nsplit": tree.nsplit}
    row["treeverify_err"] = reference.worst_row_error(tree.run(), tree.expected())
    row["treeverify_us"] = ours = timer(tree.run)
    row["treeverify_chain_us"] = timer(chain.run)
    for peer in peers:
        if peer == "triton" and kv > 200_000:
            continue
        try:
            case, run = peer_run(peer, tree, chain, kv)
            row[f"{peer}_err"] = reference.worst_row_error(run(), case.expected())
            row[f"{peer}_us"] = theirs = timer(run, 5 if peer == "triton" else 20)
            row[f"{peer}_ratio"] = theirs / ours
        except Exception as e:  # a peer that fails must not cost the run: the row says why
            row[f"{peer}_failed"] = repr(e)[:300]
    tokens = bs * (kv + n)
    row["read_us"] = tokens * KEY_DIM * 2 / limits["read_gbs"] / 1e3
    row["matmul_us"] = 2 * tokens * n * heads * (KEY_DIM + LATENT) / limits["matmul_tflops"] / 1e6
    row["roofline_fraction"] = max(row["read_us"], row["matmul_us"]) / ours
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BS,H,N,KV")
    parser.add_argument("--peers", default="triton,fa2,fa3", help="comma-separated, may be empty")
    parser.add_argument(
        "--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"), help="recorded in the results"
    )
    args = parser.parse_args()
    timer = Timer()
    limits = ceilings(timer)
    print(json.dumps(limits), flush=True)
    shapes = [Shape(*map(int, text.split(","))) for text in args.shapes]
    slots = max(shape.bs * (shape.kv + shape.n) for shape in shapes) + 64
    pool = torch.randn(max(slots, 8 * 33000), 1, KEY_DIM, device="cuda", dtype=torch.bfloat16) * 0.3
    result: dict[str, Any] = {**environment(), "commit": args.commit, "ceilings": limits, "rows": []}
    for shape in shapes:
        row = bench_shape(timer, pool, shape, [p for p in args.peers.split(",") if p], limits)
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
