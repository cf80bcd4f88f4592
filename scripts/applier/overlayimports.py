# SPDX-License-Identifier: Apache-2.0
"""What the overlay imports from SGLang, and whether a release has it. Reads sources, imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from applier.layout import HOME
from applier.tree import Tree

OURS = "sglang." + HOME.replace("/", ".")


def missing_imports(tree: Tree, overlay: Mapping[str, bytes]) -> list[str]:
    """`file:line: from x import y`, for each name that the tree's package has not."""
    known: dict[str, set[str] | None] = {}
    found = []
    for file, data in sorted(overlay.items()):
        if not file.endswith(".py"):
            continue
        for module, name, line in _imports(ast.parse(data)):
            if module not in known:
                known[module] = _names(tree, module)
            names = known[module]
            if names is None:
                found.append(f"{file}:{line}: no module {module}")
            elif name not in names and "*" not in names and not _exists(tree, f"{module}.{name}"):
                found.append(f"{file}:{line}: {module} has no {name}")
    return list(dict.fromkeys(found))


def _imports(module: ast.Module) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name, node.lineno) for alias in node.names if _theirs(node.module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _theirs(alias.name):
                    parent, _, name = alias.name.rpartition(".")
                    yield parent, name, node.lineno


def _theirs(module: str) -> bool:
    return module.startswith("sglang.") and not f"{module}.".startswith(f"{OURS}.")


def _exists(tree: Tree, module: str) -> bool:
    """Whether there is such a module or, without an __init__.py, such a package."""
    return _module(tree, module) is not None or tree.path(_folder(module)).is_dir()


def _folder(module: str) -> str:
    return module.removeprefix("sglang").removeprefix(".").replace(".", "/")


def _module(tree: Tree, module: str) -> str | None:
    """The file of a module of the package."""
    path = _folder(module)
    for candidate in (f"{path}.py", f"{path}/__init__.py" if path else "__init__.py"):
        if tree.path(candidate).is_file():
            return candidate
    return None


def _names(tree: Tree, module: str) -> set[str] | None:
    """Names at the top of a module, "*" among them where it takes in another's; None where there is no such module."""
    file = _module(tree, module)
    if file is None:
        return set() if _exists(tree, module) else None
    found: set[str] = set()
    for node in _top(ast.parse((tree.read(file) or b"").decode("utf-8", "replace")).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and _stored(name)}
    return found


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under if, try, for and with too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _top(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _top(handler.body)


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
