# SPDX-License-Identifier: Apache-2.0
"""SGLang's own draft trees through the patched FlashInferMLAAttnBackend on a GPU, eager and captured, against float64.

    python3 tests/e2e/tree_attention.py --out OUT/tree_attention.json

The tree, its mask and its verify input come from SGLang (select_top_k_tokens, build_tree_kernel_efficient,
EagleVerifyInput); the replay goes through the real CudaGraphRunner.replay_prepare. What a node may see is worked out
apart from the mask, from the child and sibling links that the accept walk uses. With the mask dropped the same check
must fail. One replay is traced: metadata to end of replay must not wait for the GPU, and must hold our kernels. Then
the buffers of TritonAttnBackend's own lines are given to every path of the kernels as they are: the two-source layout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import report  # noqa: E402
from gpu_trace import Trace  # noqa: E402
from mla_draft import draft_step  # noqa: E402
from mla_rig import Rig, Step, causal, worst_row  # noqa: E402
from triton_buffers import two_source  # noqa: E402

TOLERANCE, WRONG = 5e-3, 0.05
VOCABULARY = 1000
CONTEXT = 131072
LOUD = 8
"""Factor on the draft keys: beside 100 000 others they must matter, or a wrong mask among them would not show."""
CASES = [
    # prefixes, bucket, heads, topk, draft steps, verify width
    ([1200, 7, 33], 4, 8, 4, 5, 16),
    ([900, 5], 2, 8, 8, 6, 65),
    ([32000], 1, 8, 8, 6, 64),
    ([100000], 1, 8, 4, 6, 9),
    ([5000, 3000], 2, 64, 4, 5, 9),
]
DROP = "TREEVERIFY_DROP_MASK_FOR_TEST"


def real_tree(step: Step, topk: int, draft_steps: int) -> Any:
    """Drafts a tree as EAGLE does, on random scores; sets step.visible. Returns the EagleVerifyInput."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient, organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    generator = torch.Generator("cuda").manual_seed(step.n)
    bs = step.bs

    def draft(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.randn(rows, VOCABULARY, device="cuda", generator=generator) * 3
        found = torch.topk(torch.softmax(scores, -1), topk, dim=-1)
        return found.values, found.indices

    drafted: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] = ([], [], [])
    p, index = draft(bs)
    hidden, scores = torch.zeros(bs, 8, device="cuda", dtype=torch.bfloat16), None
    for i in range(draft_steps):
        _, hidden, scores, info = select_top_k_tokens(i, p, index, hidden, scores, topk)
        for kept, new in zip(drafted, info, strict=True):
            kept.append(new)
        p, index = draft(bs * topk)
    parents, chosen, tokens = organize_draft_results(*drafted, step.n)
    bonus = torch.zeros(bs, dtype=torch.int64, device="cuda")
    mask, positions, at, child, sibling, tokens = build_tree_kernel_efficient(
        bonus, parents, chosen, tokens, step.seq_lens, sum(step.prefixes), topk, draft_steps, step.n
    )
    step.visible = visible_from_links(child, sibling)
    depth = step.visible.sum(-1) - 1
    if not torch.equal(depth + step.seq_lens[:, None], positions.view(bs, step.n)):
        raise AssertionError("the links of the tree and the positions of its nodes disagree")
    return EagleVerifyInput(
        draft_token=tokens, custom_mask=mask, positions=positions, retrieve_index=at, retrieve_next_token=child,
        retrieve_next_sibling=sibling, retrieve_cum_len=None, spec_steps=draft_steps, topk=topk, draft_token_num=step.n,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=sum(step.prefixes), seq_lens_cpu=step.seq_lens_cpu,
    )  # fmt: skip


def visible_from_links(child: torch.Tensor, sibling: torch.Tensor) -> torch.Tensor:
    """bool [bs, n, n] from first-child and next-sibling links, int64 [bs, n], -1 where there is none."""
    bs, n = child.shape
    visible = torch.zeros(bs, n, n, dtype=torch.bool)
    for b, (children, siblings) in enumerate(zip(child.tolist(), sibling.tolist(), strict=True)):
        reached = [0]
        visible[b, 0, 0] = True
        for node in reached:
            at = children[node]
            while at >= 0:
                visible[b, at] = visible[b, node]
                visible[b, at, at] = True
                reached.append(at)
                at = siblings[at]
        if len(reached) != n:
            raise AssertionError(f"the links of request {b} reach {len(reached)} of {n} nodes")
    return visible.to(child.device)


class Captured:
    """One captured bucket: attention of a layer, with the inputs of a replay copied into fixed tensors."""

    def __init__(self, rig: Rig, backend: Any, bs: int, n: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.rig, self.backend, self.bs, self.n = rig, backend, bs, n
        backend.init_cuda_graph_state(bs, bs * n)
        self.runner = rig.graph_runner(backend, bs, n)
        buffers = self.runner.buffers
        backend.init_forward_metadata_capture_cuda_graph(
            bs, bs * n, buffers.req_pool_indices[:bs], buffers.seq_lens[:bs], None, ForwardMode.TARGET_VERIFY,
            self.runner.get_spec_info(bs * n),
        )  # fmt: skip
        self.step = rig.step([1] * bs, n)
        batch = self.step.forward_batch("eagle")
        batch.out_cache_loc = buffers.out_cache_loc
        for _ in range(2):
            self.step.attend(backend, batch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.step.attend(backend, batch)

    def load(self, step: Step) -> None:
        """Copies a step's q and k into the captured tensors."""
        rows = step.bs * step.n
        for name in ("q_nope", "q_rope", "k", "k_rope"):
            getattr(self.step, name)[:rows].copy_(getattr(step, name))

    def replay(self, batch: Any) -> None:
        """Metadata and replay, as CudaGraphRunner.replay does them. Must not wait for the GPU."""
        self.runner.replay_prepare(batch)
        self.graph.replay()


def run(prefixes: list[int], bs: int, heads: int, topk: int, draft_steps: int, n: int) -> dict[str, Any]:
    """One row: eager and replayed errors, bits, what the replay launched and waited for, host time of the metadata."""
    rig = Rig(
        device="cuda", heads=heads, context=CONTEXT, speculative_num_draft_tokens=n, speculative_eagle_topk=topk, seed=n
    )
    backend = rig.backend()
    captured = Captured(rig, backend, bs, n)
    step = rig.step(prefixes, n)
    step.k.mul_(LOUD)
    step.k_rope.mul_(LOUD)
    spec_info = real_tree(step, topk, draft_steps)
    batch = step.forward_batch("eagle")
    batch.spec_info = spec_info
    row: dict[str, Any] = {
        "prefixes": prefixes, "bucket": bs, "heads": heads, "topk": topk, "n": n,
        "dropped": os.environ.get(DROP) == "1",
    }  # fmt: skip

    backend.init_forward_metadata(batch)
    eager = step.attend(backend, batch).clone()
    expected = step.expected()
    row["eager_error"] = worst_row(eager, expected)
    row["eager_error_if_causal"] = worst_row(eager, step.expected(causal(step.bs, n).cuda()))

    captured.load(step)
    captured.replay(batch)  # the first launch of a kernel may load its module
    torch.cuda.synchronize()
    captured.out.fill_(float("nan"))
    waits, launched, replayed = traced(lambda: captured.replay(batch))
    real = step.bs * n
    row["replay_error"] = worst_row(captured.out[:real], expected)
    row["padding_is_zero"] = bool((captured.out[real:] == 0).all())
    row["same_bits_as_eager"] = bool(torch.equal(captured.out[:real], eager)) if step.bs == bs else None
    row["waits"], row["launched"], row["replayed"] = waits, launched, replayed
    row["metadata_host_us"] = host_time(captured, batch)
    judge(row)
    return row


def traced(call: Any) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Runs `call` under set_sync_debug_mode("error") and the profiler: what it waited for, launched and replayed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.profiler.record_function("verify step"):
                    call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(path))
        trace = Trace(path)
    region = next(e for e in trace.regions(lambda name: name == "verify step") if e.category == "user_annotation")
    waits = [e.name for e in trace.waits() if region.start <= e.start and e.end <= region.end]
    return waits, dict(trace.launched_in(region)), dict(trace.replayed_in(region))


def host_time(captured: Captured, batch: Any, calls: int = 300) -> dict[str, float]:
    """Host microseconds of the backend's metadata call for one replay, the runner's hand-over included."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.treeverify.attention import graph

    backend, buffers, bs = captured.backend, captured.runner.buffers, captured.bs
    rows, lens, cpu = buffers.req_pool_indices[:bs], buffers.seq_lens[:bs], buffers.seq_lens_cpu[:bs]
    total, mode, raw = batch.seq_lens_sum + bs - batch.batch_size, ForwardMode.TARGET_VERIFY, batch.batch_size
    times = []
    for i in range(calls):
        if i % 20 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        graph.hand_over_raw_bs(backend, raw)
        backend.init_forward_metadata_replay_cuda_graph(
            bs, rows, lens, total, None, mode, batch.spec_info, seq_lens_cpu=cpu
        )
        times.append((time.perf_counter_ns() - begin) / 1e3)
    times.sort()
    return {"median": statistics.median(times), "p99": times[int(len(times) * 0.99)]}


def judge(row: dict[str, Any]) -> None:
    """Adds `ok`: right where the mask counts, visibly wrong where it was dropped, and nothing waited for."""
    ours = any(name.startswith("tv_") for name in row["replayed"]) and any("prep" in name for name in row["launched"])
    errors = (row["eager_error"], row["replay_error"])
    right = min(errors) > WRONG if row["dropped"] else max(errors) <= TOLERANCE and row["eager_error_if_causal"] > WRONG
    row["ok"] = bool(
        right and ours and not row["waits"] and row["padding_is_zero"] and row["same_bits_as_eager"] is not False
    )


def layout_rows() -> list[dict[str, Any]]:
    """Rows for the two-source layout: every path of the kernels on the buffers of Triton's own lines, as they are."""
    from sglang.srt.treeverify.attention import abi, paths

    rows = []
    os.environ["TREEVERIFY_TRITON"] = "0"
    for prefixes, bucket, heads, n in ([1200, 7, 33], 4, 8, 16), ([32000], 1, 8, 64), ([5000, 3000], 2, 64, 9):
        for graph in (False, True):
            rig = Rig(
                device="cuda", heads=heads, context=CONTEXT, attention_backend="triton", speculative_num_draft_tokens=n
            )
            step, real = rig.step(prefixes, n), len(prefixes) * n
            step.k.mul_(LOUD)
            step.k_rope.mul_(LOUD)
            args = two_source(step, rig.backend(), step.forward_batch("eagle"), bucket if graph else None)
            tree, chain = step.expected(), step.expected(causal(step.bs, n).cuda())
            for path in paths.testable(torch.device("cuda", torch.cuda.current_device())):
                args.path, args.mask_kind = path.path, abi.MASK_FULL
                found = args.run()[:real]
                args.mask_kind = abi.MASK_NONE
                errors = {
                    "error": worst_row(found, tree), "error_if_causal": worst_row(found, chain),
                    "dropped_error": worst_row(args.run()[:real], chain),
                }  # fmt: skip
                ok = errors["error"] <= TOLERANCE and errors["dropped_error"] <= TOLERANCE
                ok = ok and errors["error_if_causal"] > WRONG
                layout = "two sources, " + ("replay" if graph else "eager")
                where = {"layout": layout, "path": path.name, "prefixes": prefixes, "bucket": bucket, "heads": heads}
                rows.append({**where, "n": n, "forms": args.forms(), **errors, "ok": ok})
    del os.environ["TREEVERIFY_TRITON"]
    return rows


def draft_rows() -> list[dict[str, Any]]:
    """Rows for EAGLE's draft side: a branching draft step of an MLA drafter, q and k in two parts and joined."""
    rows = []
    for split in (True, False):
        errors = draft_step(split, torch.bfloat16, "cuda")
        ok = errors["own"] <= 2 * TOLERANCE and errors["crossed"] > WRONG
        rows.append({"draft_step": "two parts" if split else "joined", **errors, "ok": ok})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results file")
    args = parser.parse_args()
    rows = []
    for dropped in (False, True):
        os.environ.pop(DROP, None)
        if dropped:
            os.environ[DROP] = "1"
        rows += [run(*case) for case in (CASES[:2] if dropped else CASES)]
        torch.cuda.empty_cache()
    os.environ.pop(DROP, None)
    slowest = max(row["metadata_host_us"]["median"] for row in rows)
    rows += draft_rows() + layout_rows()
    report.write(args.out, rows, tolerance=TOLERANCE, wrong=WRONG, slowest_metadata_host_us=slowest)
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
