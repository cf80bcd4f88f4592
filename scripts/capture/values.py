# SPDX-License-Identifier: Apache-2.0
"""What the lint knows of a value: whether it is a tensor, and on which side of the bus."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from capture.project import ClassRef, External, FunctionRef, Module


class Where(Enum):
    """Where the content of a value is."""

    UNKNOWN = auto()
    HOST = auto()
    """A Python object, or a tensor on the CPU."""
    DEVICE = auto()
    """A tensor on the GPU."""


Ref = ClassRef | FunctionRef | Module | External
"""What a value is, where that is a thing with a name."""


@dataclass(frozen=True)
class Value:
    """One value, as far as the source tells."""

    where: Where = Where.UNKNOWN
    tensor: bool = False
    """A torch tensor, on either side."""
    mask: bool = False
    """Of dtype bool."""
    pool: bool = False
    """A layer's whole KV buffer."""
    pinned: bool = False
    """A host tensor in page-locked memory."""
    sequence: bool = False
    """A Python list or tuple."""
    optional: bool = False
    """May be None."""
    none: bool = False
    """Is None."""
    const: bool | None = None
    """Its truth, where the source says it."""
    ref: Ref | None = None
    """The class, function or module it is."""
    instance: ClassRef | None = None
    """The class it is an object of."""
    item: Value | None = None
    """What a sequence holds, or a mapping's values."""
    parts: tuple[Value, ...] | None = None
    """The same element by element, where all are known."""
    scope: Scope | None = None
    """A nested function's surroundings."""

    @property
    def device(self) -> bool:
        """A tensor whose content the host does not have."""
        return self.where is Where.DEVICE

    @property
    def host(self) -> bool:
        return self.where is Where.HOST

    @property
    def unknown(self) -> bool:
        return self.where is Where.UNKNOWN


UNKNOWN = Value()
HOST = Value(Where.HOST)
NONE = Value(Where.HOST, none=True, const=False)
DEVICE = Value(Where.DEVICE, tensor=True)
MASK = Value(Where.DEVICE, tensor=True, mask=True)
HOST_TENSOR = Value(Where.HOST, tensor=True)
DTYPE = Value(Where.HOST, ref=External("torch.dtype"))


def sequence(parts: Iterable[Value]) -> Value:
    """A list or tuple of these."""
    known = tuple(parts)
    return Value(Where.HOST, sequence=True, item=join(known) if known else None, parts=known)


def join(values: Iterable[Value]) -> Value:
    """A value that may be any of these."""
    kinds = list(dict.fromkeys(values))
    if not kinds:
        return UNKNOWN
    result = kinds[0]
    for other in kinds[1:]:
        result = _either(result, other)
    return result


def _either(a: Value, b: Value) -> Value:
    if a.none or b.none:
        return replace(b if a.none else a, optional=True, const=None)
    device = a.device or b.device
    return Value(
        where=Where.DEVICE if device else a.where if a.where is b.where else Where.UNKNOWN,
        tensor=a.tensor or b.tensor,
        mask=a.mask or b.mask,
        pool=a.pool or b.pool,
        pinned=a.pinned and b.pinned,
        sequence=a.sequence and b.sequence,
        optional=a.optional or b.optional,
        const=a.const if a.const is b.const else None,
        ref=a.ref if a.ref == b.ref else None,
        instance=a.instance if a.instance == b.instance else None,
        item=join([one for one in (a.item, b.item) if one is not None]) if a.item or b.item else None,
        scope=a.scope if a.scope is b.scope else None,
    )


def constant(node: ast.Constant) -> Value:
    """A literal."""
    if node.value is None:
        return NONE
    return replace(HOST, const=bool(node.value)) if isinstance(node.value, bool | int | str | float) else HOST


def element(value: Value) -> Value:
    """What iterating over a value gives."""
    if value.item is not None:
        return value.item
    return replace(value, pool=False, optional=False, parts=None) if value.tensor else UNKNOWN


def mixed(values: list[Value], mask: bool) -> Value:
    """The result of an operator."""
    if any(one.device for one in values):
        return replace(DEVICE, mask=mask)
    if any(one.unknown for one in values):
        return UNKNOWN
    return replace(HOST_TENSOR, mask=mask) if any(one.tensor for one in values) else HOST


Env = dict[str, Value]
"""Local names, and attributes as dotted names, with their values."""


@dataclass(eq=False)
class Scope:
    """What a nested function sees of the function around it."""

    env: Env
