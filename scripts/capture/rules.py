# SPDX-License-Identifier: Apache-2.0
"""The rules: what breaks a capture, or makes a step wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture.calls import FACTORIES, FROM_HOST, JOINS, LIKE, NEW, Call, names_cpu
from capture.values import Value

RULES = {
    "host-read": "copies from the GPU to the host and waits for it",
    "synchronize": "waits for the GPU",
    "branch": "Python branches on a tensor's content: waits, and a graph keeps the branch of its capture",
    "nonzero": "the result's size depends on the content: waits for the GPU to know it",
    "mask-index": "indexing by a bool tensor: its size depends on the content, so it waits for the GPU",
    "size": "a size or bound is read from a tensor on the GPU: waits for it",
    "upload": "copies from the host: waits where the memory is pageable, and a graph repeats the bytes of its capture",
    "cat": "joins step data into a new tensor at a new address",
    "alloc": "allocates, where buffers are to have been allocated before",
    "raw-alloc": "allocates behind torch's back: cudaMalloc is refused during capture",
    "pool-cast": "casts a layer's whole KV pool",
    "plan": "FlashInfer's plan(): copies index lists to the host and waits",
    "loop": "launches in a Python loop, a request at a time",
    "format": "writes a tensor's content as text: copies it to the host and waits",
}
"""Every rule with what is wrong about it."""

READS = frozenset(("item", "tolist", "cpu", "numpy", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"))
NONZERO = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive bincount masked_scatter combinations".split()
)
SCALARS = frozenset(("int", "float", "bool", "complex", "round"))
WALKS = frozenset(("any", "all", "min", "max", "sorted"))
"""Builtins that compare tensors, or the elements of one."""
SIZED = frozenset(
    "empty zeros ones full arange rand randint randn linspace new_empty new_zeros new_ones new_full view reshape "
    "expand split narrow repeat tile resize_ repeat_interleave".split()
)
"""Functions and methods that take sizes."""
LOGS = frozenset("debug info warning error exception critical log".split())
PLANS = frozenset(("plan", "begin_forward"))
RAW = ("cudaMalloc", "cudaFree", "cuMemAlloc", "caching_allocator_alloc", "caching_allocator_delete")
BY_NAME = frozenset(("plan", "synchronize"))
"""Rules that go by a method's name alone: they count where the method itself is not followed."""


def of_call(call: Call) -> Iterator[str]:
    """Rules that a call breaks."""
    name, receiver = call.name, call.receiver
    unread = receiver is not None and not receiver.host
    values = [*call.args, *call.keywords.values()]
    if unread and (name in READS or (name == "to" and call.to_host() and not call.switched_on("non_blocking"))):
        yield "host-read"
    if call.dotted in ("torch.equal", "torch.allclose", "torch.is_nonzero", "numpy.array", "numpy.asarray"):
        if any(one.device for one in values):
            yield "host-read"
    if receiver is None and not call.dotted:
        compared = [one.item for one in values if one.sequence and one.item] if name in WALKS else []
        if name in SCALARS | WALKS | {"range"} and any(one.device for one in [*values, *compared]):
            yield "size" if name == "range" else "host-read"
    if name in ("synchronize", "empty_cache") and (receiver is None or not receiver.tensor):
        yield "synchronize"
    if name in NONZERO and (unread if receiver is not None else bool(call.torch)):
        yield "nonzero"
    if call.torch == "where" and len(values) == 1:
        yield "nonzero"
    if _reads_sizes(call):
        yield "size"
    if _uploads(call):
        yield "upload"
    if _reads_by_copy(call):
        yield "host-read"
    if call.torch in JOINS:
        yield "cat"
    if _allocates(call):
        yield "alloc"
    if name.startswith(RAW):
        yield "raw-alloc"
    if receiver is not None and receiver.pool and _casts(call):
        yield "pool-cast"
    if name in PLANS and receiver is not None and not receiver.tensor:
        yield "plan"
    unbound = call.torch.startswith("Tensor.") and any(one.device for one in call.args)
    if unbound and name in READS | NONZERO:
        yield "host-read" if name in READS else "nonzero"
    if (name in LOGS | {"format"} and receiver is not None) or (
        receiver is None and name in ("print", "str", "repr", "format")
    ):
        if any(one.device for one in values):
            yield "format"


def of_truth(value: Value) -> Iterator[str]:
    """Rules that `if value` breaks."""
    if value.device and not value.sequence:
        yield "branch"


def of_index(base: Value, index: Sequence[Value], stored: Value | None = None) -> Iterator[str]:
    """Rules that base[index] breaks, or base[index] = stored."""
    if base.host and not base.tensor:
        if any(one.device for one in index):
            yield "size"
        return
    if base.host:
        return
    for one in index:
        if one.device and one.mask and not (stored is not None and not stored.tensor):
            yield "mask-index"
        if one.host and (one.sequence or one.tensor) and base.tensor:
            yield "upload"


def of_bound(value: Value) -> Iterator[str]:
    """Rules that base[value:] breaks."""
    if value.device:
        yield "size"


def of_text(value: Value) -> Iterator[str]:
    """Rules that f"{value}" breaks."""
    if value.device:
        yield "format"


def of_loop(launches: int) -> Iterator[str]:
    """Rules that a Python loop breaks, whose body makes so many tensors on the GPU."""
    if launches:
        yield "loop"


def _reads_sizes(call: Call) -> bool:
    if call.name not in SIZED or (call.receiver is None and not call.torch):
        return False
    sizes = list(call.args)
    sizes += [one for key, one in call.keywords.items() if key in ("size", "end", "start", "repeats")]
    if call.torch and call.name in ("split", "narrow", "repeat_interleave", "tile"):
        sizes = sizes[1:]
    if call.name in ("full", "new_full"):
        sizes = sizes[:1]
    if call.name == "repeat_interleave":
        return any(one.device for one in sizes) and "output_size" not in call.keywords
    return any(one.device or (one.sequence and one.item is not None and one.item.device) for one in sizes)


def _uploads(call: Call) -> bool:
    """Content that the host has, to the GPU; not from page-locked memory without waiting."""
    receiver = call.receiver
    patient = call.switched_on("non_blocking")
    if call.dotted in FROM_HOST:
        where = call.written("device")
        there = call.on_device if where is None else not names_cpu(where)
        return there and not (call.args and call.args[0].device)
    if call.name == "new_tensor" and receiver is not None:
        return receiver.device
    if receiver is None:
        return False
    if call.name == "cuda" or (call.name == "to" and call.to_device()):
        return receiver.host and receiver.tensor and not (patient and receiver.pinned)
    if call.name == "copy_" and receiver.device and call.args:
        source = call.args[0]
        return source.host and source.tensor and not (patient and source.pinned)
    return False


def _reads_by_copy(call: Call) -> bool:
    """host.copy_(device) without non_blocking."""
    receiver = call.receiver
    if call.name != "copy_" or receiver is None or not receiver.host or not receiver.tensor or not call.args:
        return False
    return call.args[0].device and not call.switched_on("non_blocking")


def _allocates(call: Call) -> bool:
    if call.written("out") is not None:
        return False
    if call.torch in FACTORIES:
        where = call.written("device")
        return call.on_device if where is None else not names_cpu(where)
    receiver = call.receiver
    if call.torch in LIKE or call.torch in JOINS:
        return not any(one.host and one.tensor for one in call.args)
    return receiver is not None and receiver.device and (call.name in NEW or call.name in ("clone", "repeat"))


def _casts(call: Call) -> bool:
    return (call.name == "to" and call.to_dtype()) or call.name in ("float", "half", "bfloat16", "clone", "contiguous")
