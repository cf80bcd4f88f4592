# SPDX-License-Identifier: Apache-2.0
"""Asking a source file for the dtype of a variable at a place."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from applier.dtype_eval import Evaluator, Known, Unknown, Value, function_in


class NotEstablished(Exception):
    """The dtype can't be read off; `line` is where the search ended (1 where it never began)."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Finding:
    """A dtype by its torch name and the line that decides it."""

    dtype: str
    line: int


class Source:
    """One parsed file."""

    def __init__(self, data: bytes) -> None:
        self._text = data.decode("utf-8", "replace")
        self._lines = self._text.split("\n")
        self._evaluator = Evaluator(self._text)

    def line(self, number: int) -> str:
        """A source line without its indentation."""
        return self._lines[number - 1].strip()

    @cache  # noqa: B019 - a Source lives as long as one check
    def dtype_of(self, site: str, var: str, when: str | None = None, unless: str | None = None) -> Finding:
        """Dtype of `var` ("x" or "self.x") at the end of "Class.method" or "function", or after its branch `when`.

        `unless`: what `x if test else y` on the way gives where a test that holds this text is false.
        """
        evaluator = self._evaluator if unless is None else Evaluator(self._text, unless)
        function, owner = _find(evaluator, site)
        value = evaluator.variable(function, owner, var, when)
        if value is None:
            raise NotEstablished(f"no branch with {when} in {site}", function.lineno)
        if not value and var.startswith("self.") and owner is not None:
            value = evaluator.attribute(owner, var.removeprefix("self."))
        if unless is not None and not evaluator.unless_met:
            raise NotEstablished(f"{var} in {site} depends on no choice by {unless}", function.lineno)
        return _one(site, var, value, function.lineno)


def _find(evaluator: Evaluator, site: str) -> tuple[ast.FunctionDef, ast.ClassDef | None]:
    *owners, name = site.split(".")
    owner: ast.ClassDef | None = None
    body: list[ast.stmt] = evaluator.module.body
    for step in owners:
        owner = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == step), None)
        if owner is None:
            raise NotEstablished(f"no class {step}")
        body = owner.body
    function = function_in(body, name)
    if function is None:
        raise NotEstablished(f"no function {site}", owner.lineno if owner else 1)
    return function, owner


def _one(site: str, var: str, value: Value, line: int) -> Finding:
    for item in value:
        if isinstance(item, Unknown):
            raise NotEstablished(f"{var} in {site} comes from {item.text}, which can't be followed", item.line)
    known = {item.dtype: item.line for item in sorted(value, key=lambda item: item.line) if isinstance(item, Known)}
    if len(known) > 1:
        several = ", ".join(f"{dtype} at line {at}" for dtype, at in known.items())
        raise NotEstablished(f"{var} in {site} has more than one dtype: {several}", line)
    if not known:
        raise NotEstablished(f"{var} in {site}: no assignment tells its dtype", line)
    dtype, at = known.popitem()
    return Finding(dtype, at)
