# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism that differ stop, and say in what. Real process groups, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker import Worker


def _compared(rank: int, folder: str) -> dict[str, str]:
    """What each check says on this rank, "" where it is content."""
    import json

    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.treeverify import ranks
    from tree_batch import TreeBatch, sampling

    trees = TreeBatch([[1, 2], [3, 4]], [sampling()] * 2)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", rank, "gloo")
    parallel_state.initialize_model_parallel(2, backend="gloo")

    def told(check: Any, *arguments: Any) -> str:
        try:
            check(*arguments)
        except RuntimeError as e:
            return str(e)
        return ""

    tree = trees.verify_input(trees.candidates(3, 4), 7).tree
    found = {"same trees": told(ranks.check_trees, tree, 4)}
    tree.tokens[1, 3] += rank
    found["other trees"] = told(ranks.check_trees, tree, 5)
    package = Path(folder) / str(rank)
    package.mkdir()
    ranks.__file__ = str(package / "ranks.py")
    for name, patch_set in (("same patches", "aaaa"), ("other patches", f"{rank}bbb")):
        manifest = {"pin": "p", "patch_set": patch_set, "kernels": {"sources": "cccc"}}
        (package / "_manifest.json").write_text(json.dumps(manifest))
        ranks.check_installation.cache_clear()
        found[name] = told(ranks.check_installation)
    assert torch.distributed.get_world_size() == 2
    return found


def compared_by_two(folder: str) -> list[dict[str, str]]:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.starmap(_compared, [(rank, folder) for rank in range(2)], chunksize=1)


def test_ranks_that_differ_stop(patched_package: Path, tmp_path: Path) -> None:
    fresh = Worker(patched_package)  # torch's threads do not survive a fork
    first, second = fresh(compared_by_two, folder=str(tmp_path))
    fresh.close()
    assert first == second, "every rank stops, with the same words"
    assert first["same trees"] == first["same patches"] == ""
    assert "draft trees of step 5 differ" in first["other trees"] and "rank 1: " in first["other trees"]
    assert "rank 0: p patches 0bbb" in first["other patches"] and "rank 1: p patches 1bbb" in first["other patches"]
