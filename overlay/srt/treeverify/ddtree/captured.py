# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a step's small parts, whose launches cost the host more time than their work costs the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Captured(Generic[Key, Result]):
    """A function of tensors that stay where they are, as a graph for each key.

    A graph's result is the same object, and the same memory, every time.
    """

    def __init__(self, run: Callable[[Key], Result]) -> None:
        """run: launches only; what it reads and writes besides its result is allocated once."""
        self._run = run
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Result]] = {}

    @torch.no_grad()
    def capture(self, keys: Iterable[Key]) -> int:
        """Captures anew, the keys that need most memory first: the others share it. Returns the number of graphs."""
        keys = list(keys)
        self._graphs.clear()
        pool = torch.cuda.graph_pool_handle()
        for key in keys:
            self._run(key)  # compiles and loads what it needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = self._run(key)
            self._graphs[key] = graph, result
        return len(self._graphs)

    @property
    def keys(self) -> list[Key]:
        """Those captured, in that order."""
        return list(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __call__(self, key: Key) -> Result:
        graph, result = self._graphs[key]
        graph.replay()
        return result
