# SPDX-License-Identifier: Apache-2.0
"""Calls of torch: what comes back, and on which side."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from capture.project import External
from capture.values import DEVICE, DTYPE, HOST, HOST_TENSOR, UNKNOWN, Value, sequence

FACTORIES = frozenset(
    "arange as_tensor empty empty_strided eye from_file full linspace logspace ones rand randint randn randperm range "
    "scalar_tensor tensor zeros".split()
)
"""Functions of torch whose result lies where `device` says; on the CPU without it."""
FROM_HOST = frozenset(("torch.tensor", "torch.as_tensor", "torch.scalar_tensor", "torch.asarray"))
"""Those that take their content from the host."""
LIKE = frozenset(("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"))
NEW = frozenset(("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"))
JOINS = frozenset("cat concat concatenate dstack hstack row_stack stack vstack column_stack block_diag".split())

SHAPE_METHODS = frozenset(
    "size dim numel nelement stride data_ptr element_size storage_offset get_device is_contiguous is_floating_point "
    "is_complex is_pinned untyped_storage ndimension dense_dim has_names".split()
)
"""Methods of a tensor that the host answers by itself."""
SHAPE_ATTRIBUTES = frozenset(
    "shape dtype device ndim is_cuda is_cpu layout itemsize nbytes requires_grad names is_sparse is_nested".split()
)
BOOLEAN = frozenset(
    "eq ne lt le gt ge isin isnan isinf isfinite isposinf isneginf logical_and logical_or logical_not logical_xor "
    "isclose any all bool".split()
)
"""Functions and methods whose result is a tensor of dtype bool."""
SPLITS = frozenset("split chunk unbind tensor_split split_with_sizes".split())
"""Those that give a tuple of tensors."""
SAME_SIDE = frozenset("view reshape flatten contiguous clone detach squeeze unsqueeze expand expand_as".split())
"""Those that keep what is known of the tensor."""


@dataclass(frozen=True)
class Call:
    """A call with what is known of its parts."""

    node: ast.Call
    name: str
    """The last name of what is called."""
    dotted: str
    """The full name of what is called, where it is outside the package."""
    receiver: Value | None
    """What the method is called on; None for functions."""
    args: Sequence[Value]
    keywords: dict[str, Value]
    on_device: bool = False
    """Inside `with torch.device(...)`."""

    @property
    def torch(self) -> str:
        """The name below torch, "" for anything else."""
        return self.dotted.removeprefix("torch.") if self.dotted.startswith("torch.") else ""

    @property
    def everything(self) -> list[Value]:
        return [*([self.receiver] if self.receiver else []), *self.args, *self.keywords.values()]

    def written(self, name: str) -> ast.expr | None:
        """A keyword argument as it stands in the source."""
        return next((one.value for one in self.node.keywords if one.arg == name), None)

    def switched_on(self, name: str) -> bool:
        """Whether a keyword argument is literally True."""
        node = self.written(name)
        return isinstance(node, ast.Constant) and node.value is True

    def target(self) -> ast.expr | None:
        """What .to() is told: its `device` or `dtype`, else its first argument."""
        first = self.node.args[0] if self.node.args else None
        return self.written("device") or first or self.written("dtype")

    def to_host(self) -> bool:
        """Whether .to() names the CPU."""
        return names_cpu(self.target())

    def to_device(self) -> bool:
        """Whether .to() names a device that is not the CPU."""
        target = self.target()
        if target is None or names_cpu(target) or (self.written("device") is None and not self.node.args):
            return False
        if self.written("device") is not None:
            return True
        text = ast.unparse(target)
        return "device" in text or "cuda" in text

    def to_dtype(self) -> bool:
        """Whether .to() names a dtype alone, as far as names tell."""
        target = self.target()
        return target is not None and not self.to_host() and not self.to_device()


def names_cpu(node: ast.expr | None) -> bool:
    """ "cpu" or torch.device("cpu")."""
    if isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == "cpu"


def result(call: Call) -> Value:
    """What a call of torch, or of a tensor's method, gives back."""
    if call.torch in ("device", "dtype", "Size"):
        return HOST
    if call.torch:
        return _of_function(call)
    receiver = call.receiver
    if receiver is None:
        return HOST if call.dotted else UNKNOWN
    if receiver.tensor:
        return _of_method(call, receiver)
    if call.name in ("tolist", "item"):
        return HOST
    if call.name in ("cpu", "numpy") or (call.name == "to" and call.to_host()):
        return HOST_TENSOR
    if receiver.host and receiver.sequence and call.name in ("copy", "pop"):
        return receiver if call.name == "copy" else receiver.item or UNKNOWN
    if receiver.host and receiver.item and call.name in ("get", "setdefault", "popitem"):
        return receiver.item
    return HOST if receiver.host and receiver.instance is None and receiver.ref is None else UNKNOWN


def _of_function(call: Call) -> Value:
    name = call.torch.rsplit(".", 1)[-1]
    if call.torch.startswith(("cuda.", "distributed.", "library.", "_C.", "version.", "backends.", "jit.")):
        return HOST
    if call.torch in FACTORIES or name == "asarray":
        where = call.written("device")
        on_device = call.on_device if where is None else not names_cpu(where)
        if name in ("as_tensor", "asarray") and where is None and call.args:
            on_device = call.args[0].device
        value = DEVICE if on_device else HOST_TENSOR
        return replace(value, mask=_is_bool(call), pinned=not on_device and call.switched_on("pin_memory"))
    if name in ("from_numpy", "frombuffer"):
        return HOST_TENSOR
    if name in ("is_tensor", "is_floating_point", "numel", "result_type", "finfo", "iinfo", "equal", "allclose"):
        return HOST
    tensors = [one.item if one.sequence and one.item else one for one in call.everything]
    if any(one.device for one in tensors):
        there = DEVICE
    elif any(one.tensor and one.host for one in tensors):
        there = HOST_TENSOR
    else:
        there = DEVICE if name in LIKE or any(one.unknown for one in tensors) else HOST_TENSOR
    return _shaped(call, name, there)


def _of_method(call: Call, receiver: Value) -> Value:
    name = call.name
    if name in SHAPE_METHODS or name in ("tolist", "item"):
        return HOST
    if name in ("cpu", "numpy") or (name == "to" and call.to_host()):
        return HOST_TENSOR
    if name == "pin_memory":
        return replace(receiver, pinned=True)
    if name == "cuda" or (name == "to" and call.to_device()):
        return replace(DEVICE, mask=receiver.mask)
    if name == "bool" or (name == "to" and _is_bool(call)):
        return replace(receiver, mask=True)
    if name in SAME_SIDE:
        return replace(receiver, pool=receiver.pool and name == "view", optional=False)
    return _shaped(call, name, DEVICE if receiver.device else HOST_TENSOR)


def _shaped(call: Call, name: str, value: Value) -> Value:
    if name in BOOLEAN or _is_bool(call):
        value = replace(value, mask=True)
    if name in SPLITS or (name in ("topk", "sort", "max", "min", "unique") and len(call.args) > 1):
        return Value(HOST.where, sequence=True, item=value)
    if name in ("topk", "sort", "meshgrid"):
        return sequence([value, value])
    return value


def _is_bool(call: Call) -> bool:
    dtype = call.written("dtype") or (call.node.args[0] if call.name == "to" and call.node.args else None)
    return dtype is not None and ast.unparse(dtype) == "torch.bool"


def torch_attribute(name: str) -> Value:
    """`torch.int32` is a dtype; the rest are modules and functions."""
    last = name.rsplit(".", 1)[-1]
    number = last.rstrip("0123456789_")
    if name.count(".") == 1 and (number in ("int", "uint", "float", "bfloat", "complex") or last in ("bool", "long")):
        return DTYPE
    return Value(HOST.where, ref=External(name))
