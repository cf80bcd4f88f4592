# SPDX-License-Identifier: Apache-2.0
"""Expressions: what is known of their values; calls are followed, and what breaks a rule is reported."""

from __future__ import annotations

import ast
import builtins
from dataclasses import replace

from capture import rules
from capture.calls import SHAPE_ATTRIBUTES, Call, result, torch_attribute
from capture.findings import Step
from capture.known import MORE
from capture.project import ClassRef, External, FunctionRef, Module
from capture.truth import Tests, dotted
from capture.values import DEVICE, HOST, UNKNOWN, Env, Scope, Value, constant, element, join, mixed, sequence

STDLIB = frozenset(
    "numpy math os sys ctypes time logging itertools functools re contextlib dataclasses bisect random json".split()
)
COMPILED = ("jit", "register_fake")
"""Decorators of functions that do not run as Python."""
UNCALLED = frozenset("isinstance issubclass hasattr getattr setattr callable type id print repr str is_tensor".split())
"""What does not call a function that it is given."""
POOLS = frozenset(("get_key_buffer", "get_value_buffer"))
"""Methods that give a layer's whole KV buffer."""


class Expressions(Tests):
    """The expressions of a function."""

    def value(self, node: ast.expr | None, env: Env) -> Value:
        """What is known of an expression's value; its calls are followed and reported."""
        match node:
            case None | ast.Slice():
                return HOST
            case ast.Constant():
                return constant(node)
            case ast.Name(id=name):
                return self._name(name, env)
            case ast.Attribute():
                return self._attribute(node, env)
            case ast.Call():
                return self._call(node, env)
            case ast.Subscript(value=base, slice=index):
                return self._index(node, self.value(base, env), index, env)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self.value(left, env), *(self.value(other, env) for other in others)]
                if any(isinstance(op, ast.In | ast.NotIn) for op in ops):
                    self.report([rule for one in values[1:] for rule in rules.of_truth(one)], node)
                identity = all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops)
                return mixed(values, mask=True) if not identity else HOST
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
                values = [self.value(one, env) for one in (right.elts if isinstance(right, ast.Tuple) else [right])]
                self.report([rule for one in values for rule in rules.of_text(one)], node)
                return HOST
            case ast.BinOp(left=left, right=right):
                values = [self.value(left, env), self.value(right, env)]
                if all(one.sequence for one in values):
                    return Value(HOST.where, sequence=True, item=join(element(one) for one in values))
                return mixed(values, mask=all(one.mask for one in values if one.tensor))
            case ast.UnaryOp(op=op, operand=inner):
                if isinstance(op, ast.Not):
                    truth = self.truth(inner, env)
                    return replace(HOST, const=None if truth is None else not truth)
                return self.value(inner, env)
            case ast.BoolOp(values=parts):
                truth = self.truth(node, env)
                values = [self.quietly(part, env) for part in parts]
                return replace(HOST, const=truth) if truth is not None else join(values)
            case ast.IfExp(test=test, body=left, orelse=right):
                truth = self.truth(test, env)
                if truth is not None:
                    return self.value(left if truth else right, env)
                narrowed = dict(env)
                self.narrow(test, narrowed)
                return join([self.value(left, narrowed), self.value(right, env)])
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                return self._literal(parts, env)
            case ast.Dict(values=values):
                found = [self.value(one, env) for one in values]
                return Value(HOST.where, item=join(found) if found else None)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return self._comprehension(node, env)
            case ast.JoinedStr(values=parts):
                for part in parts:
                    if isinstance(part, ast.FormattedValue):
                        self.report(rules.of_text(self.value(part.value, env)), node)
                return HOST
            case ast.NamedExpr(target=target, value=value):
                its = self.value(value, env)
                env[target.id] = its
                return its
            case ast.Starred(value=inner):
                return element(self.value(inner, env))
            case ast.Lambda(body=body):
                self.value(body, dict(env))
                return HOST
            case ast.Await(value=inner) | ast.Yield(value=inner) | ast.YieldFrom(value=inner):
                return self.value(inner, env)
        return UNKNOWN

    def _literal(self, parts: list[ast.expr], env: Env) -> Value:
        values = [self.value(part, env) for part in parts]
        if any(isinstance(part, ast.Starred) for part in parts):
            return Value(HOST.where, sequence=True, item=join(values))
        return sequence(values)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, env: Env) -> Value:
        inner, before = dict(env), self.launches
        for part in node.generators:
            self.assign(part.target, element(self.value(part.iter, inner)), inner)
            for test in part.ifs:
                self.truth(test, inner)
        its = self.value(node.value if isinstance(node, ast.DictComp) else node.elt, inner)
        first = node.generators[0]
        if not fixed(first.iter):
            source = f"for {ast.unparse(first.target)} in {ast.unparse(first.iter)}"
            self.report(rules.of_loop(self.launches - before), node, source)
        return Value(HOST.where, sequence=not isinstance(node, ast.DictComp), item=its)

    def _name(self, name: str, env: Env) -> Value:
        if name in env:
            return env[name]
        found = self.walker.project.lookup(self.module, name)
        known = self.walker.known
        return known.named(name) if found is None else known.of_named(found, self.module, name)

    def _attribute(self, node: ast.Attribute, env: Env) -> Value:
        text = dotted(node)
        if text in env:
            return env[text]
        return self._member(node, self.value(node.value, env), node.attr)

    def _member(self, node: ast.AST, base: Value, attr: str) -> Value:
        """`base.attr`; a property is a call."""
        walker = self.walker
        if base.instance is not None:
            found = walker.known.attribute(base.instance, attr)
            if isinstance(found, FunctionRef):
                if found.has_decorator("property", "cached_property"):
                    return self._enter(node, found, [base], {}, None)
                return Value(HOST.where, ref=found)
            return found if found is not None else walker.known.named(attr)
        match base.ref:
            case ClassRef() as cls:
                method = walker.project.method(cls, attr)
                return Value(HOST.where, ref=method) if method else HOST
            case Module() as module:
                return walker.known.of_named(walker.project.attribute(module, attr), module, attr)
            case External(name=name):
                return torch_attribute(f"{name}.{attr}") if name.startswith("torch") else (
                    Value(HOST.where, ref=External(f"{name}.{attr}"))
                )  # fmt: skip
        if attr in SHAPE_ATTRIBUTES:
            return Value(HOST.where, sequence=attr == "shape", item=HOST if attr == "shape" else None)
        if base.tensor:
            return replace(base, pool=False) if attr in ("T", "mT", "data", "real") else UNKNOWN
        return walker.known.named(attr)

    def _index(self, node: ast.expr, base: Value, index: ast.expr, env: Env, stored: Value | None = None) -> Value:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        plain = []
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper, part.step):
                    if bound is not None:
                        self.report(rules.of_bound(self.value(bound, env)), node)
            else:
                plain.append(self.value(part, env))
        if base.unknown and base.ref is None and not plain:
            return base
        self.report(rules.of_index(base, plain, stored), node)
        if base.sequence:
            if isinstance(index, ast.Slice):
                return replace(base, parts=None)
            if base.parts and isinstance(index, ast.Constant) and isinstance(index.value, int):
                at = index.value
                return base.parts[at] if -len(base.parts) <= at < len(base.parts) else UNKNOWN
            return base.item or UNKNOWN
        if base.tensor:
            return replace(base, pool=False, optional=False)
        if base.item is not None:
            return base.item
        return UNKNOWN if not base.host else HOST if base.ref is None and base.instance is None else UNKNOWN

    def _call(self, node: ast.Call, env: Env) -> Value:
        callee, receiver = self._callee(node.func, env)
        args, keywords = self._arguments(node, env)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        outside = callee.ref.name if isinstance(callee.ref, External) and receiver is None else ""
        name = outside.rpartition(".")[2] or name  # under whatever name it was imported
        call = Call(node, name, outside, receiver, args, keywords, self.on_device)
        entered = isinstance(callee.ref, FunctionRef | ClassRef)
        followed = entered and isinstance(callee.ref, FunctionRef) and callee.ref.module.path in self.walker.scope
        broken = rules.of_call(call)
        self.report([rule for rule in broken if not entered or (rule in rules.BY_NAME and not followed)], node)
        if not entered:
            self._handed(call)
        its = self._outcome(call, callee, env)
        its = replace(DEVICE, pool=True) if name in POOLS else its
        if not entered and its.device and (call.torch or (receiver is not None and receiver.device)):
            self.launches += 1
        return its

    def _handed(self, call: Call) -> None:
        """A function given to what is not followed counts as called; by partial and map with what they are given."""
        given = list(call.args[1:])
        for at, value in enumerate([*call.args, *call.keywords.values()]):
            if not isinstance(value.ref, FunctionRef) or call.name in UNCALLED:
                continue
            args = {"partial": given, "map": [element(one) for one in given]}.get(call.name, []) if at == 0 else []
            keywords = call.keywords if call.name == "partial" else {}
            if value.ref.owner and not value.scope and not value.ref.has_decorator("staticmethod"):
                args = [Value(HOST.where, instance=value.ref.owner), *args]
            scope = value.scope.env if value.scope else None
            self._enter(call.node, value.ref, args, {**keywords, MORE: UNKNOWN}, scope)

    def _callee(self, func: ast.expr, env: Env) -> tuple[Value, Value | None]:
        """What is called, and what it is called on where it is a method."""
        match func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attr) if self._class and self.function:
                method = self.walker.project.method(self._class, attr, self.function.owner)
                return Value(HOST.where, ref=method), Value(HOST.where, instance=self._class)
            case ast.Attribute(value=base, attr=attr):
                its = self.value(base, env)
                callee = env[dotted(func)] if dotted(func) in env else self._member(func, its, attr)
                if callee.instance is not None and (method := self.walker.project.method(callee.instance, "__call__")):
                    return Value(HOST.where, ref=method), callee
                return callee, None if isinstance(its.ref, Module | External | ClassRef) else its
        its = self.value(func, env)
        if its.instance is not None and (method := self.walker.project.method(its.instance, "__call__")):
            return Value(HOST.where, ref=method), its
        return its, None

    def _outcome(self, call: Call, callee: Value, env: Env) -> Value:
        """What a call gives back; functions of the package are entered."""
        args, keywords, receiver = list(call.args), call.keywords, call.receiver
        match callee.ref:
            case FunctionRef() as function:
                if isinstance(callee.scope, Scope):
                    return self._enter(call.node, function, args, keywords, callee.scope.env)
                if function.owner and not function.has_decorator("staticmethod"):
                    if receiver is not None:
                        args = [receiver, *args]
                    elif function.has_decorator("classmethod"):
                        args = [Value(HOST.where, ref=function.owner), *args]
                return self._enter(call.node, function, args, keywords, None)
            case ClassRef() as cls:
                return self._construct(call.node, cls, args, keywords)
            case External(name=name):
                op = self.walker.project.ops.get(name.removesuffix(".default"))
                if op is not None:
                    return self._enter(call.node, op, args, keywords, None)
                if name in ("copy.copy", "copy.deepcopy", "typing.cast") and args:
                    return args[-1]
                if not name.startswith("torch"):
                    return HOST if name.split(".")[0] in STDLIB else UNKNOWN
                return result(call)
        if receiver is None and call.name:
            return self._builtin(call, env)
        return UNKNOWN if receiver is not None and receiver.instance is not None else result(call)

    def _construct(self, node: ast.Call, cls: ClassRef, args: list[Value], keywords: dict[str, Value]) -> Value:
        its = Value(HOST.where, instance=cls)
        for name in ("__init__", "__post_init__"):
            found = self.walker.project.method(cls, name)
            if found is not None:
                given = (args, keywords) if name == "__init__" else ([], {})
                self._enter(node, found, [its, *given[0]], given[1], None)
        return its

    def _enter(
        self, node: ast.AST, function: FunctionRef, args: list[Value], keywords: dict[str, Value], scope: Env | None
    ) -> Value:
        walker = self.walker
        if self.muted or function.module.path not in walker.scope or function.has_decorator(*COMPILED):
            if not self.muted:
                walker.not_followed.add(function.place)
            return walker.known.returned(function)
        step = Step(function.name, self.module.path, getattr(node, "lineno", function.node.lineno))
        return walker.call(function, args, keywords, (*self.path, step), scope)

    def _arguments(self, node: ast.Call, env: Env) -> tuple[list[Value], dict[str, Value]]:
        args: list[Value] = []
        for one in node.args:
            its = self.value(one.value if isinstance(one, ast.Starred) else one, env)
            if isinstance(one, ast.Starred):
                args += its.parts if its.parts is not None else [element(its)]
            else:
                args.append(its)
        given = [(keyword.arg, self.value(keyword.value, env)) for keyword in node.keywords]
        return args, {name or MORE: its for name, its in given}

    def _builtin(self, call: Call, env: Env) -> Value:
        args, name = call.args, call.name
        first = args[0] if args else UNKNOWN
        match name:
            case "getattr" if len(call.node.args) > 1:
                return self._getattr(call, env)
            case "enumerate":
                return Value(HOST.where, sequence=True, item=sequence([HOST, element(first)]))
            case "zip":
                return Value(HOST.where, sequence=True, item=sequence([element(one) for one in args]))
            case "list" | "tuple" | "sorted" | "reversed" | "set" | "iter" | "filter":
                return Value(HOST.where, sequence=True, item=element(args[-1]) if args else None)
            case "map":
                return Value(HOST.where, sequence=True, item=UNKNOWN)
            case "next" | "sum":
                return element(first)
            case "range":
                return Value(HOST.where, sequence=True, item=HOST)
            case "abs" | "pow" | "divmod":
                return first
        return HOST if hasattr(builtins, name) else UNKNOWN

    def _getattr(self, call: Call, env: Env) -> Value:
        base, name = call.args[0], call.node.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            return UNKNOWN
        text = f"{dotted(call.node.args[0])}.{name.value}"
        if text in env:
            return env[text]
        if base.instance is None:
            return self.walker.known.named(name.value)
        if self.walker.known.attribute(base.instance, name.value) is None:
            return call.args[2] if len(call.args) > 2 else UNKNOWN
        return self._member(call.node, base, name.value)

    def assign(self, target: ast.expr, value: Value, env: Env) -> None:
        """Binds names, attributes by their dotted name, and what indexing reports."""
        match target:
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value.parts if value.parts and len(value.parts) == len(targets) else None
                for index, one in enumerate(targets):
                    self.assign(one, parts[index] if parts else element(value), env)
            case ast.Starred(value=inner):
                self.assign(inner, Value(HOST.where, sequence=True, item=element(value)), env)
            case ast.Name(id=name):
                for key in [key for key in env if key.startswith(f"{name}.")]:
                    del env[key]
                named = self.walker.known.named(name)
                env[name] = named if value.unknown and named.host and not value.tensor else value
            case ast.Attribute(value=base):
                self.value(base, env)
                env[dotted(target)] = value
            case ast.Subscript(value=base, slice=index):
                its = self.value(base, env)
                self._index(target, its, index, env, value)


def fixed(iterated: ast.expr) -> bool:
    """Whether a loop runs as often in every step: over a literal, or as often as the server was told."""
    match iterated:
        case ast.Tuple() | ast.List():
            return True
        case ast.Call(func=ast.Name(id="range"), args=args):
            return all(isinstance(one, ast.Constant) or dotted(one).startswith("self.") for one in args)
    return False
