# SPDX-License-Identifier: Apache-2.0
"""Tests: which way they go where that is known, what it costs to look, and what is known after them."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from capture import rules
from capture.findings import Step
from capture.project import ClassRef, External, FunctionRef, Module
from capture.values import UNKNOWN, Env, Value

if TYPE_CHECKING:
    from capture.walker import Walker


class Tests(ABC):
    """One function being followed. Muted ones report nothing and enter nothing."""

    def __init__(
        self,
        walker: Walker,
        function: FunctionRef | None,
        path: tuple[Step, ...],
        module: Module,
        muted: bool = False,
        cls: ClassRef | None = None,
    ) -> None:
        """`function` is None for a module's own expressions; `cls` is the class of self."""
        self.walker, self.function, self.path, self.module = walker, function, path, module
        self.muted, self._class = muted, cls
        self.returns: list[Value] = []
        self.on_device = False
        """Inside `with torch.device(...)`."""
        self.launches = 0
        """Calls so far that make tensors on the GPU."""

    @abstractmethod
    def value(self, node: ast.expr | None, env: Env) -> Value:
        """What is known of an expression's value; its calls are followed and reported."""

    def report(self, broken: Iterable[str], node: ast.AST, source: str | None = None) -> None:
        """Notes rules that `node` breaks."""
        if self.muted or self.function is None:
            return
        for rule in broken:
            self.walker.report(rule, node, self.function, self.path, source or ast.unparse(node))

    def truth(self, test: ast.expr, env: Env) -> bool | None:
        """What decides a test; what it costs to look is reported."""
        assumed = self._assumed(test)
        if assumed is not None:
            return assumed
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                truth = self.truth(inner, env)
                return None if truth is None else not truth
            case ast.BoolOp(op=op, values=parts):
                ends = isinstance(op, ast.Or)
                truths = []
                for part in parts:
                    truths.append(self.truth(part, env))
                    if truths[-1] is ends:
                        return ends
                return (not ends) if all(truth is (not ends) for truth in truths) else None
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                its = self.value(left, env)
                is_none = True if its.none else None
                if not its.none and not its.optional and (its.instance or its.tensor or its.ref):
                    is_none = False
                return is_none if is_none is None or isinstance(op, ast.Is) else not is_none
            case ast.Call(func=ast.Name(id="isinstance"), args=[one, classes]):
                return self._isinstance(self.value(one, env), classes, env)
        its = self.value(test, env)
        self.report(rules.of_truth(its), test)
        if its.instance and not its.optional and not self._has_length(its.instance):
            return True
        return its.const

    def _has_length(self, cls: ClassRef) -> bool:
        members = self.walker.project.members
        return any(True for name in ("__len__", "__bool__") for _ in members(cls, name))

    def _assumed(self, test: ast.expr) -> bool | None:
        text = ast.unparse(test)
        for key, truth in self.walker.region.assume.items():
            if text == key or text.endswith(f".{key}"):
                return truth
        return None

    def _isinstance(self, its: Value, classes: ast.expr, env: Env) -> bool | None:
        wanted = [self.value(one, env).ref for one in (classes.elts if isinstance(classes, ast.Tuple) else [classes])]
        if its.tensor and not its.unknown:
            if any(one == External("torch.Tensor") for one in wanted):
                return True
        if its.instance is None:
            return None
        known = [one for one in wanted if isinstance(one, ClassRef)]
        if any(self.walker.project.is_a(its.instance, one) for one in known):
            return True if not its.optional else None
        further = any(self.walker.project.is_a(one, its.instance) for one in known)
        return None if further or len(known) < len(wanted) else False

    def narrow(self, test: ast.expr, env: Env) -> None:
        """After a test held: isinstance names the class, `is not None` takes None away."""
        match test:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    self.narrow(part, env)
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), cls]):
                found = self.quietly(cls, env).ref
                if isinstance(found, ClassRef) and env.get(name, UNKNOWN).instance is None:
                    env[name] = self.walker.known.instance(found)
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                its = env.get(dotted(left))
                if its is not None:
                    env[dotted(left)] = replace(its, optional=False)

    def quietly(self, node: ast.expr, env: Env) -> Value:
        muted, self.muted = self.muted, True
        try:
            return self.value(node, env)
        finally:
            self.muted = muted


def dotted(node: ast.AST) -> str:
    """A dotted name as written, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
