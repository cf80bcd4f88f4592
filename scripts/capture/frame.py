# SPDX-License-Identifier: Apache-2.0
"""Statements, in order, on what is known of the values; both branches of a test that nothing decides."""

from __future__ import annotations

import ast

from capture import rules
from capture.expressions import Expressions, fixed
from capture.known import MORE
from capture.project import Function, FunctionRef
from capture.truth import dotted
from capture.values import HOST, NONE, UNKNOWN, Env, Scope, Value, element, join


class Frame(Expressions):
    """The statements of a function. Each gives False where what follows is not reached."""

    def run(self, body: list[ast.stmt], env: Env) -> bool:
        return all(self._statement(node, env) for node in body)

    def _statement(self, node: ast.stmt, env: Env) -> bool:
        match node:
            case ast.Return(value=value):
                self.returns.append(self.value(value, env) if value else NONE)
                return False
            case ast.Raise() | ast.Continue() | ast.Break():
                return False
            case ast.Expr(value=value):
                self.value(value, env)
            case ast.Assign(targets=targets, value=value):
                its = self.value(value, env)
                for target in targets:
                    self.assign(target, its, env)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                its = self.value(value, env) if value else UNKNOWN
                if its.unknown:
                    its = self.walker.known.annotation(annotation, self.module, dotted(target))
                self.assign(target, its, env)
            case ast.AugAssign(target=target, op=op, value=value):
                load = ast.copy_location(_as_load(target), target)
                its = self.value(ast.copy_location(ast.BinOp(load, op, value), node), env)
                self.assign(target, its, env)
            case ast.If(test=test, body=body, orelse=other):
                return self._branch(test, body, other, env)
            case ast.For(target=target, iter=iterated, body=body, orelse=other):
                self._for(node, target, iterated, body, env)
                return self.run(other, env)
            case ast.While(test=test, body=body, orelse=other):
                for _ in range(2):  # once more on what the first pass left
                    if self.truth(test, env) is not False:
                        self._maybe(body, env)
                return self.run(other, env)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return self._with(items, body, env)
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last):
                alive = self.run(body, env) and self.run(other, env)
                for handler in [one for one in handlers if not _refuses(one.body)]:
                    alive = self._maybe(handler.body, env) or alive
                return self.run(last, env) and alive
            case ast.Assert(test=test):
                self.truth(test, env)
                self.narrow(test, env)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                env[node.name] = self._nested(node, env)
            case ast.Import() | ast.ImportFrom():
                self._import(node, env)
            case ast.Delete(targets=targets):
                for target in targets:
                    env.pop(dotted(target), None)
            case ast.Match(subject=subject, cases=cases):
                self.value(subject, env)
                for case in cases:
                    if case.guard is not None:
                        self.truth(case.guard, env)
                    self._maybe(case.body, env)
        return True

    def _nested(self, node: Function, env: Env) -> Value:
        within = self.function.name if self.function else ""
        owner = self.function.owner if self.function else None
        return Value(HOST.where, ref=FunctionRef(self.module, node, owner, within), scope=Scope(env))

    def _branch(self, test: ast.expr, body: list[ast.stmt], other: list[ast.stmt], env: Env) -> bool:
        truth = self.truth(test, env)
        if truth is not None:
            if truth:
                self.narrow(test, env)
            return self.run(body if truth else other, env)
        if _refuses(body):
            return self.run(other, env)
        if other and _refuses(other):
            self.narrow(test, env)
            return self.run(body, env)
        left, right = dict(env), dict(env)
        self.narrow(test, left)
        alive = [branch for branch, stays in ((left, self.run(body, left)), (right, self.run(other, right))) if stays]
        if alive:
            _merge(env, alive)
        return bool(alive)

    def _maybe(self, body: list[ast.stmt], env: Env) -> bool:
        after = dict(env)
        alive = self.run(body, after)
        _merge(env, [env, after])
        return alive

    def _for(self, node: ast.AST, target: ast.expr, iterated: ast.expr, body: list[ast.stmt], env: Env) -> None:
        over = self.value(iterated, env)
        before = self.launches
        for _ in range(2):
            after = dict(env)
            self.assign(target, element(over), after)
            self.run(body, after)
            _merge(env, [dict(env), after])
        if not fixed(iterated):
            source = f"for {ast.unparse(target)} in {ast.unparse(iterated)}"
            self.report(rules.of_loop(self.launches - before), node, source)

    def _with(self, items: list[ast.withitem], body: list[ast.stmt], env: Env) -> bool:
        before = self.on_device
        for item in items:
            its = self._entered(item.context_expr, self.value(item.context_expr, env))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, its, env)
            if ast.unparse(item.context_expr).startswith("torch.device(") and "cpu" not in ast.unparse(item):
                self.on_device = True
        alive = self.run(body, env)
        self.on_device = before
        return alive

    def _entered(self, node: ast.expr, its: Value) -> Value:
        """What `with` gives: __enter__ and __exit__ of a class of the package are calls."""
        if its.instance is None:
            return its
        given = UNKNOWN
        for name in ("__exit__", "__enter__"):
            method = self.walker.project.method(its.instance, name)
            given = self._enter(node, method, [its], {MORE: UNKNOWN}, None) if method else its
        return given

    def _import(self, node: ast.Import | ast.ImportFrom, env: Env) -> None:
        for alias in node.names:
            bound = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
            found = self.walker.project.imported(self.module, node, bound)
            env[bound] = self.walker.known.of_named(found, self.module, bound)


def _merge(env: Env, branches: list[Env]) -> None:
    names = set().union(*branches)
    merged = {}
    for name in names:
        found = [branch[name] for branch in branches if name in branch]
        if len(found) == len(branches) or "." not in name:
            merged[name] = join(found)
    env.clear()
    env.update(merged)


def _as_load(node: ast.expr) -> ast.expr:
    loaded = ast.parse(ast.unparse(node), mode="eval").body
    for part in ast.walk(loaded):
        if hasattr(part, "lineno"):
            part.lineno = getattr(node, "lineno", 1)
    return loaded


def _refuses(body: list[ast.stmt]) -> bool:
    """Whether a branch ends in an error: what it does before may cost what it likes."""
    return isinstance(body[-1], ast.Raise)
