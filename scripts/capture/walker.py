# SPDX-License-Identifier: Apache-2.0
"""Follows a region's code from its entries, function by function, each once for what it is called with."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from capture.config import Region
from capture.findings import Finding, Step
from capture.frame import Frame
from capture.known import MORE, Known
from capture.project import Function, FunctionRef, Module, Project
from capture.values import HOST, UNKNOWN, Env, Value, join

DEPTH = 60
"""Calls inside calls that are followed."""


class Walker:
    """One region over one project."""

    def __init__(self, project: Project, region: Region, scope: Iterable[str]) -> None:
        """Calls are followed into the files of `scope` only."""
        self.project, self.region, self.scope = project, region, frozenset(scope)
        self.known = Known(project, region, self._evaluate)
        self.findings: dict[tuple[str, str, int, str], Finding] = {}
        self.followed: set[str] = set()
        self.not_followed: set[str] = set()
        self._seen: dict[tuple[Function, int, frozenset[tuple[str, Value]]], Value] = {}

    def enter(self, place: str) -> None:
        """Follows one entry. LookupError where the package has no such function."""
        found = self.project.find_function(place)
        if found is None:
            raise LookupError(place)
        function, cls = found
        step = Step(function.name, function.module.path, function.node.lineno)
        self.call(function, [Value(HOST.where, instance=cls)] if cls else [], {MORE: UNKNOWN}, (step,), None)

    def call(
        self,
        function: FunctionRef,
        args: list[Value],
        keywords: dict[str, Value],
        path: tuple[Step, ...],
        scope: Env | None,
    ) -> Value:
        """What a function of the project gives back; its findings are noted. `scope` is what surrounds a nested one."""
        bound = self.known.bind(function, args, keywords)
        key = (function.node, id(scope), frozenset(bound.items()))
        if key in self._seen:
            return self._seen[key]
        annotated = self.known.returned(function)
        self._seen[key] = annotated  # for a function that calls itself
        if len(path) > DEPTH or function.place in self.region.stop:
            self.not_followed.add(function.place)
            return annotated
        self.followed.add(function.place)
        first = next(iter(bound.values()), UNKNOWN)
        frame = Frame(self, function, path, function.module, cls=first.instance if function.owner else None)
        frame.run(function.node.body, {**(scope or {}), **bound})
        value = join(frame.returns) if frame.returns else annotated
        self._seen[key] = annotated if value.unknown and value.ref is None else value
        return self._seen[key]

    def report(self, rule: str, node: ast.AST, function: FunctionRef, path: tuple[Step, ...], source: str) -> None:
        """Notes a finding once, with the first way that leads there."""
        if rule not in self.region.rules:
            return
        line = int(getattr(node, "lineno", function.node.lineno))
        key = (rule, function.module.path, line, source)
        if key not in self.findings:
            name = function.name
            self.findings[key] = Finding(self.region.name, rule, function.module.path, line, name, source, path)

    def _evaluate(self, node: ast.expr, module: Module, function: FunctionRef | None, env: Env) -> Value:
        return Frame(self, function, (), module, muted=True).value(node, env)
