# SPDX-License-Identifier: Apache-2.0
"""What the source says of names without running: annotations, members of classes, what methods assign to self."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from capture.calls import torch_attribute
from capture.config import Region
from capture.project import ClassRef, External, FunctionRef, Module, Named, Project
from capture.values import DEVICE, HOST, HOST_TENSOR, NONE, UNKNOWN, Env, Value, constant, join, sequence

Evaluate = Callable[[ast.expr, Module, "FunctionRef | None", Env], Value]
"""What an expression of a module, or of a function in it, comes to; nothing is reported."""

PLAIN = frozenset("int float bool str bytes complex object Path range slice None".split())
SEQUENCES = frozenset("list List tuple Tuple Sequence Iterable Iterator set Set frozenset deque Collection".split())
MAPPINGS = frozenset(("dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"))
MORE = "**"
"""Stands for keyword arguments that are not written out."""
LOCALS = 4
"""How many local names deep an assignment to self is followed."""


class Known:
    """What is known of names in one region."""

    def __init__(self, project: Project, region: Region, evaluate: Evaluate) -> None:
        self.project, self._evaluate = project, evaluate
        self._types = {name: project.find_class(places[0]) for name, places in region.types.items()}
        self._concrete = {name: project.find_class(places[0]) for name, places in region.concrete.items()}
        wanted = {**region.types, **region.concrete}
        self.missing = [wanted[name][0] for name, cls in {**self._types, **self._concrete}.items() if cls is None]
        """Classes that the region names and the package does not have."""
        self._attributes: dict[tuple[str, str], Value | None] = {}
        self._globals: dict[tuple[str, str], Value] = {}

    def bind(self, function: FunctionRef, args: list[Value], keywords: dict[str, Value], entry: bool = False) -> Env:
        """Parameters with what is passed; where that is not known, what the annotation or the name says.

        Defaults count where it is known that nothing else is passed: not for an entry, nor for a call with **.
        """
        node, env = function.node.args, Env()
        positional = [*node.posonlyargs, *node.args]
        defaults: dict[str, ast.expr | None] = dict(zip([a.arg for a in positional][::-1], node.defaults[::-1]))  # noqa: B905
        defaults.update(zip([a.arg for a in node.kwonlyargs], node.kw_defaults, strict=True))
        loose = entry or MORE in keywords
        for index, argument in enumerate([*positional, *node.kwonlyargs]):
            name, default = argument.arg, defaults.get(argument.arg)
            declared = self.annotation(argument.annotation, function.module, name)
            if name in keywords:
                value = keywords[name]
            elif index < min(len(args), len(positional)):
                value = args[index]
            elif not isinstance(default, ast.Constant) or (loose and default.value is not None):
                value = declared
            elif loose:
                value = replace(declared, optional=True)
            else:
                value = constant(default)
            env[name] = declared if value.unknown and value.ref is None and not declared.unknown else value
        if node.vararg:
            rest = args[len(positional) :]
            env[node.vararg.arg] = sequence(rest) if rest else Value(HOST.where, sequence=True, item=UNKNOWN)
        if node.kwarg:
            env[node.kwarg.arg] = HOST
        return env

    def returned(self, function: FunctionRef) -> Value:
        """What a function's annotation says it returns."""
        if function.node.returns is None:
            return UNKNOWN
        return self.annotation(function.node.returns, function.module, function.node.name)

    def named(self, name: str) -> Value:
        """SGLang calls what lies on the host *_cpu."""
        return HOST if name.endswith("_cpu") or "_cpu_" in name else UNKNOWN

    def instance(self, cls: ClassRef) -> Value:
        """An object of the class an annotation names, or of the one that stands for it here."""
        return Value(HOST.where, instance=self._concrete.get(cls.name) or cls)

    def annotation(self, node: ast.expr | None, module: Module, name: str = "") -> Value:
        """The value of an annotated name."""
        if node is None:
            return self.named(name)
        match node:
            case ast.Constant(value=None):
                return NONE
            case ast.Constant(value=str(text)):
                try:
                    return self.annotation(ast.parse(text, mode="eval").body, module, name)
                except SyntaxError:
                    return UNKNOWN
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return join([self.annotation(left, module, name), self.annotation(right, module, name)])
            case ast.Subscript(value=outer, slice=inner):
                return self._generic(_last(outer), inner, module, name)
        text = _last(node)
        if text in PLAIN:
            return HOST
        if text == "Tensor":
            return replace(HOST_TENSOR if self.named(name).host else DEVICE)
        if text in SEQUENCES:
            return Value(HOST.where, sequence=True, item=UNKNOWN)
        if text in MAPPINGS:
            return HOST
        found = self.project.expression(module, node)
        return self.instance(found) if isinstance(found, ClassRef) else UNKNOWN

    def _generic(self, outer: str, inner: ast.expr, module: Module, name: str) -> Value:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "Optional":
            return replace(self.annotation(inner, module, name), optional=True)
        if outer == "Union":
            return join(self.annotation(part, module, name) for part in parts)
        if outer in ("Tuple", "tuple") and not any(getattr(part, "value", None) is ... for part in parts):
            return sequence(self.annotation(part, module, name) for part in parts)
        if outer in SEQUENCES:
            return Value(HOST.where, sequence=True, item=self.annotation(parts[0], module, name))
        if outer in MAPPINGS:
            return Value(HOST.where, item=self.annotation(parts[-1], module, name))
        if outer in ("type", "Type"):
            found = self.project.expression(module, inner)
            return Value(HOST.where, ref=found) if isinstance(found, ClassRef) else UNKNOWN
        return self.annotation(inner, module, name) if outer in ("ClassVar", "Final", "Annotated") else UNKNOWN

    def of_named(self, found: Named | None, module: Module, name: str) -> Value:
        """What a top-level name stands for."""
        if found is None:
            return UNKNOWN
        if isinstance(found, External):
            return torch_attribute(found.name) if found.name.startswith("torch") else Value(HOST.where, ref=found)
        if isinstance(found, Module | ClassRef | FunctionRef):
            return Value(HOST.where, ref=found)
        key = (module.path, name)
        if key not in self._globals:
            self._globals[key] = UNKNOWN
            self._globals[key] = self._evaluate(found, module, None, {})
        return self._globals[key]

    def attribute(self, cls: ClassRef, name: str) -> Value | FunctionRef | None:
        """What an object of the class has under a name; None where nothing in the source says."""
        for one in self.project.bases(cls):
            declared = self._types.get(f"{one.name}.{name}")
            if declared is not None:
                return Value(HOST.where, instance=declared)
        for home, member in self.project.members(cls, name):
            if isinstance(member, FunctionRef):
                return member
            if isinstance(member, ast.AnnAssign):
                return self.annotation(member.annotation, home.module, name)
            value = self._evaluate(member.value, home.module, None, {})
            if not value.none:
                return replace(value, const=None)  # an object may have its own
        key = (cls.place, name)
        if key not in self._attributes:
            self._attributes[key] = None  # asked for while it is being found out
            self._attributes[key] = self._assigned(cls, name)
        return self._attributes[key]

    def _assigned(self, cls: ClassRef, name: str) -> Value | None:
        """What the methods of a class and its bases assign to self.name."""
        found = []
        for store in self.project.assigned(cls, name):
            method, value = store.method, store.value
            if value is None:
                found.append(self.annotation(store.annotation, method.module, name))
            elif not isinstance(value, ast.Constant):
                env = self.bind(method, [Value(HOST.where, instance=cls)], {}, entry=True)
                known = self._with_locals(value, method, env)
                found.append(self._evaluate(value, method.module, method, known))
            elif value.value is not None:
                found.append(replace(constant(value), const=None))
        return join(found) if found else None

    def _with_locals(self, node: ast.expr, method: FunctionRef, env: Env, depth: int = 0) -> Env:
        """The parameters, and the local names that an expression is made of."""
        for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - set(env):
            values = [one.value for one in self.project.locals(method).get(name, [])]
            if values and depth < LOCALS:
                env[name] = UNKNOWN
                inner = [(value, self._with_locals(value, method, env, depth + 1)) for value in values]
                env[name] = join(self._evaluate(value, method.module, method, known) for value, known in inner)
        return env


def _last(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
