# SPDX-License-Identifier: Apache-2.0
"""A small abstract interpreter: runs a function over dtypes instead of tensors.

It follows what matters here and nothing else: torch constructors and their dtype argument, slices, views, casts,
list-then-cat, branches, self attributes through the class, methods of the class, dtype parameters to the calls that
pass them. What it can't follow becomes `Unknown`; it never guesses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SAME = frozenset(
    "clone contiguous flatten view reshape unsqueeze squeeze repeat repeat_interleave expand cuda cpu transpose "
    "permute detach pin_memory".split()
)
CASTS = {"long": "int64", "int": "int32", "bool": "bool", "float": "float32", "half": "float16", "byte": "uint8"}
LIKE = frozenset("zeros_like ones_like empty_like full_like cat concat stack sort clone".split())
FLOATS = frozenset("zeros ones empty rand randn".split())
ALIASES = {"long": "int64", "int": "int32", "float": "float32", "half": "float16", "short": "int16"}
ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
INTEGERS = ORDER[:6]


@dataclass(frozen=True)
class Known:
    """A tensor of this dtype (or, with `is_type`, the dtype itself), decided at `line`."""

    dtype: str
    line: int
    is_type: bool = False


@dataclass(frozen=True)
class Unknown:
    """An expression that could not be followed."""

    text: str
    line: int


Value = frozenset[Known | Unknown]  # all that an expression may be; empty: says nothing (None, a number, a parameter)
Env = dict[str, Value]
NOTHING: Value = frozenset()


def _has_words(text: str, part: str) -> bool:
    """Whether `part` stands in `text` and cuts no name in two: MODE is no part of MODE_PACKED."""
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


class Evaluator:
    """Evaluates functions of one module. `when` and `snapshots` catch the state after branches with that test.

    Of `x if test else y` whose test holds `unless` only y counts.
    """

    def __init__(self, text: str, unless: str | None = None) -> None:
        self.unless, self.unless_met = unless, False
        self._lines = text.split("\n")
        self.module = ast.parse(text)
        self._stores: dict[ast.FunctionDef, set[str]] = {}
        self._edges: dict[ast.FunctionDef, dict[str, set[str]]] = {}
        self._busy: set[tuple[str, str]] = set()

    def variable(
        self, function: ast.FunctionDef, owner: ast.ClassDef | None, var: str, when: str | None
    ) -> Value | None:
        """`var` at every exit of the function, or after every branch whose test holds `when`; None: no such branch."""
        frame = _Frame(self, owner, function, {var}, when)
        end = frame.run()
        states = frame.exits + ([end] if end is not None else []) if when is None else frame.snapshots
        if when is not None and not states:
            return None
        return union(state.get(var, NOTHING) for state in states)

    def returned(self, function: ast.FunctionDef, owner: ast.ClassDef | None) -> Value:
        """What a function gives back."""
        key = (owner.name if owner else "", function.name + "()")
        if key in self._busy:
            return NOTHING
        self._busy.add(key)
        results = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        frame = _Frame(self, owner, function, set().union(*map(_reads, results)))
        frame.run()
        self._busy.discard(key)
        return union(frame.returns)

    def attribute(self, owner: ast.ClassDef, name: str) -> Value:
        """All that the methods of a class ever store in self.`name`."""
        key = (owner.name, name)
        if key in self._busy:
            return NOTHING
        self._busy.add(key)
        stored: list[Value] = []
        for method in self.writers(owner, name):
            frame = _Frame(self, owner, method, {f"self.{name}"})
            frame.run()
            stored += frame.stored.get(name, [])
        self._busy.discard(key)
        return union(stored)

    def writers(self, owner: ast.ClassDef, name: str) -> list[ast.FunctionDef]:
        """Methods of a class that assign self.`name`."""
        methods = (node for node in owner.body if isinstance(node, ast.FunctionDef))
        return [
            method for method in methods if f"self.{name}" in self._text(method) and name in self._stored_in(method)
        ]

    def _stored_in(self, method: ast.FunctionDef) -> set[str]:
        if method not in self._stores:
            self._stores[method] = _stored(method)
        return self._stores[method]

    def _text(self, node: ast.FunctionDef) -> str:
        """Source of a function: looking for a word there is much faster than walking its tree."""
        return "\n".join(self._lines[node.lineno - 1 : node.end_lineno])

    def edges(self, function: ast.FunctionDef) -> dict[str, set[str]]:
        """What the function's variables are made from."""
        if function not in self._edges:
            self._edges[function] = _edges(function)
        return self._edges[function]

    def passed(self, parameter: str, function: str) -> Value:
        """What calls of `function` in this module pass for a parameter by keyword."""
        values: list[Value] = []
        owners: list[ast.ClassDef | None] = [None, *(n for n in self.module.body if isinstance(n, ast.ClassDef))]
        for owner in owners:
            for caller in (owner or self.module).body:
                if not isinstance(caller, ast.FunctionDef) or f".{function}(" not in self._text(caller):
                    continue
                frame = _Frame(self, owner, caller, set())
                calls = (node for node in ast.walk(caller) if isinstance(node, ast.Call))
                for call in calls:
                    if isinstance(call.func, ast.Attribute) and call.func.attr == function:
                        values += [frame.value(k.value, {}) for k in call.keywords if k.arg == parameter]
        return union(values)


class _Frame:
    """One function being run for the variables in `wanted`; assignments they don't depend on are skipped."""

    def __init__(
        self,
        parent: Evaluator,
        owner: ast.ClassDef | None,
        function: ast.FunctionDef,
        wanted: set[str],
        when: str | None = None,
    ) -> None:
        self._parent, self._owner, self._function, self._when = parent, owner, function, when
        self._wanted = _closure(parent.edges(function), wanted)
        self.snapshots: list[Env] = []
        self.exits: list[Env] = []
        self.returns: list[Value] = []
        self.stored: dict[str, list[Value]] = {}

    def run(self) -> Env | None:
        """State at the end of the function; None where it always returns or raises."""
        return self.block(self._function.body, {name: NOTHING for name in parameters(self._function)})

    def block(self, body: list[ast.stmt], env: Env) -> Env | None:
        """State after the statements; None where they never fall through."""
        env = dict(env)
        for statement in body:
            after = self._statement(statement, env)
            if after is None:
                return None
            env = after
        return env

    def _statement(self, node: ast.stmt, env: Env) -> Env | None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value, env)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._bind(target, value, env)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item])) if (
                name in self._wanted
            ):
                env[name] = env.get(name, NOTHING) | self.value(item, env)
            case ast.Return(value=value):
                self.returns.append(self.value(value, env) if value is not None else NOTHING)
                self.exits.append(env)
                return None
            case ast.Raise() | ast.Continue() | ast.Break():
                return None
            case ast.If(test=test, body=body, orelse=other):
                left_before = len(self.exits)
                taken = self.block(body, env)
                if self._when is not None and _has_words(ast.unparse(test), self._when):
                    self.snapshots += self.exits[left_before:] + ([taken] if taken is not None else [])
                return _join(taken, self.block(other, env))
            case ast.For(body=body) | ast.While(body=body) | ast.AsyncFor(body=body):
                return _join(env, self.block(body, env))
            case ast.With(body=body) | ast.AsyncWith(body=body):
                return self.block(body, env)
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last):
                after = self.block([*body, *other], env)
                for handler in handlers:
                    after = _join(after, self.block(handler.body, env))
                return self.block(last, after) if after is not None else None
        return env

    def _bind(self, target: ast.expr, value: ast.expr, env: Env) -> None:
        """Assignments to names and self attributes; a[:n] = x leaves a's dtype alone."""
        bound: list[tuple[str, Value]] = []
        for one, source in pairs(target, value):
            name = variable_name(one)
            if name in self._wanted:
                bound.append((name, unknown(value) if source is None else self.value(source, env)))
        for name, its in bound:
            env[name] = its
            if name.startswith("self."):
                self.stored.setdefault(name.removeprefix("self."), []).append(its)

    def value(self, node: ast.expr, env: Env) -> Value:
        """All dtypes an expression may have."""
        match node:
            case ast.Name(id=name):
                return env[name] if name in env else unknown(node)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._attribute(node, name, env)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                name = ALIASES.get(name, name)
                known = name in ORDER or name.startswith(("uint", "float8"))
                return frozenset({Known(name, node.lineno, is_type=True)}) if known else unknown(node)
            case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.UnaryOp(operand=inner):
                return self.value(inner, env)
            case ast.Compare():
                return frozenset({Known("bool", node.lineno)})
            case ast.IfExp(test=test, body=left, orelse=right):
                if self._parent.unless is not None and _has_words(ast.unparse(test), self._parent.unless):
                    self._parent.unless_met = True
                    return self.value(right, env)
                return self.value(left, env) | self.value(right, env)
            case ast.BoolOp(values=items) | ast.List(elts=items) | ast.Tuple(elts=items):
                return union(self.value(item, env) for item in items)
            case ast.BinOp(left=left, right=right):
                return _promote(self.value(left, env), self.value(right, env))
            case ast.Constant():
                return NOTHING
            case ast.Call():
                return self._call(node, env)
        return unknown(node)

    def _attribute(self, node: ast.expr, name: str, env: Env) -> Value:
        if f"self.{name}" in env:
            return env[f"self.{name}"]
        if self._owner is None or not self._parent.writers(self._owner, name):
            return unknown(node)
        return self._parent.attribute(self._owner, name)

    def _call(self, node: ast.Call, env: Env) -> Value:
        if not isinstance(node.func, ast.Attribute):
            return unknown(node)
        name, on = node.func.attr, node.func.value
        dtype = next((keyword.value for keyword in node.keywords if keyword.arg == "dtype"), None)
        if is_name(on, "torch"):
            return self._torch(node, name, dtype, env)
        if name == "to":
            casts = [argument for argument in ([dtype] if dtype else node.args) if not _is_device(argument)]
            types = [self._types(argument, env) or unknown(argument) for argument in casts]
            return union(types) if types else self.value(on, env)
        if name in CASTS and not node.args:
            return frozenset({Known(CASTS[name], node.lineno)})
        if name in SAME:
            return self.value(on, env)
        if is_name(on, "self") and self._owner and (method := function_in(self._owner.body, name)):
            return self._parent.returned(method, self._owner)
        return unknown(node)

    def _torch(self, node: ast.Call, name: str, dtype: ast.expr | None, env: Env) -> Value:
        def known(text: str) -> Value:
            return frozenset({Known(text, node.lineno)})

        if dtype is not None:
            return self._types(dtype, env) or unknown(dtype)
        if name in LIKE and node.args:
            return self.value(node.args[0], env)
        if name == "cumsum" and node.args:
            return frozenset(_summed(one, node.lineno) for one in self.value(node.args[0], env))
        if name in FLOATS:
            return known("float32")
        if name == "arange":
            fractions = any(isinstance(a, ast.Constant) and isinstance(a.value, float) for a in node.args)
            return unknown(node) if fractions else known("int64")
        if name == "full" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            kinds = {bool: "bool", int: "int64", float: "float32"}
            kind = kinds.get(type(node.args[1].value))
            return known(kind) if kind else unknown(node)
        return unknown(node)

    def _types(self, node: ast.expr, env: Env) -> Value:
        """A dtype expression as tensors of that dtype; empty where it can't be followed."""
        value = self.value(node, env)
        if not value and isinstance(node, ast.Name) and node.id in parameters(self._function):
            value = self._parent.passed(node.id, self._function.name)
        return frozenset(Known(one.dtype, one.line) for one in value if isinstance(one, Known) and one.is_type)


def union(values: Iterable[Value]) -> Value:
    return frozenset().union(*values)


def unknown(node: ast.expr) -> Value:
    return frozenset({Unknown(ast.unparse(node), node.lineno)})


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def function_in(body: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    """The function of that name among statements."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def variable_name(node: ast.AST) -> str:
    """ "x" or "self.x", "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and is_name(node.value, "self"):
        return f"self.{node.attr}"
    return ""


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Single targets with their values, tuples taken apart; None where a call's result is spread."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
    elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from pairs(one, its)
    else:
        for one in target.elts:
            yield one, None


def _edges(function: ast.FunctionDef) -> dict[str, set[str]]:
    """For every variable of the function, the variables it is made from."""
    edges: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for one, value in pairs(target, node.value):
                    edges.setdefault(variable_name(one), set()).update(_reads(value or node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            edges.setdefault(variable_name(node.target), set()).update(_reads(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            for argument in node.args:
                edges.setdefault(variable_name(node.func.value), set()).update(_reads(argument))
    return edges


def _closure(edges: dict[str, set[str]], wanted: set[str]) -> set[str]:
    """`wanted` and all they are made from inside the function."""
    todo, seen = set(wanted), set()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= edges.get(name, set()) - seen
    return seen - {""}


def _reads(node: ast.expr) -> set[str]:
    return {name for n in ast.walk(node) if (name := variable_name(n))}


def _stored(node: ast.stmt) -> set[str]:
    nodes = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in nodes if is_name(n.value, "self")}


def _is_device(node: ast.expr) -> bool:
    """An argument of .to() that names no dtype: "cuda", True, device, self.device."""
    return isinstance(node, ast.Constant) or getattr(node, "attr", getattr(node, "id", "")) == "device"


def _join(left: Env | None, right: Env | None) -> Env | None:
    if left is None or right is None:
        return left if right is None else right
    return {name: left.get(name, NOTHING) | right.get(name, NOTHING) for name in {**left, **right}}


def _summed(one: Known | Unknown, line: int) -> Known | Unknown:
    if isinstance(one, Known):
        return Known("int64" if one.dtype in INTEGERS else one.dtype, line)
    return one


def _promote(left: Value, right: Value) -> Value:
    """Operands that are no tensors for us (numbers, sizes) don't change a tensor's dtype."""
    known = [one for one in left | right if isinstance(one, Known)]
    if not known:
        return left | right
    return frozenset({max(known, key=lambda one: ORDER.index(one.dtype))})
