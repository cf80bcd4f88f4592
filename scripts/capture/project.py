# SPDX-License-Identifier: Apache-2.0
"""A package read as source: modules, classes and functions by name, imports followed. Nothing is imported or run."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "sglang"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class External:
    """Something outside the package, by its dotted name: torch.cuda.synchronize."""

    name: str


@dataclass(eq=False)
class Module:
    """One file. `names` maps its top-level names to what defines them."""

    path: str
    tree: ast.Module
    names: dict[str, ast.AST] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    """Its imports of all that another module has."""

    @property
    def dotted(self) -> list[str]:
        """The package the file's relative imports start from, from sglang down."""
        return [PACKAGE, *self.path.split("/")[:-1]]


@dataclass(frozen=True)
class ClassRef:
    """A class of the package."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def place(self) -> str:
        """As the configuration writes it."""
        return f"{self.module.path}::{self.node.name}"


@dataclass(frozen=True)
class FunctionRef:
    """A function of the package; `owner` is the class it stands in, `within` names the functions around it."""

    module: Module
    node: Function
    owner: ClassRef | None = None
    within: str = ""

    @property
    def name(self) -> str:
        """Class.function or function, nested ones as outer.inner."""
        inner = f"{self.within}.{self.node.name}" if self.within else self.node.name
        return f"{self.owner.name}.{inner}" if self.owner and not self.within else inner

    @property
    def place(self) -> str:
        """As the configuration writes it."""
        return f"{self.module.path}::{self.name}"

    def has_decorator(self, *names: str) -> bool:
        """Whether a decorator's last name is one of these."""
        for decorator in self.node.decorator_list:
            node = decorator.func if isinstance(decorator, ast.Call) else decorator
            if getattr(node, "attr", getattr(node, "id", "")) in names:
                return True
        return False


@dataclass(frozen=True)
class Store:
    """An attribute of self as a method declares or assigns it."""

    method: FunctionRef
    annotation: ast.expr | None
    value: ast.expr | None


Named = Module | ClassRef | FunctionRef | External | ast.expr
"""What a name can stand for; an expression is what a module assigned to it."""


class Project:
    """The modules below one `sglang` package folder, parsed when they are first needed."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._modules: dict[str, Module | None] = {}
        self._bases: dict[str, list[ClassRef]] = {}
        self._members: dict[str, dict[str, list[Function | ast.AnnAssign | ast.Assign]]] = {}
        self._stores: dict[str, dict[str, list[Store]]] = {}
        self._locals: dict[Function, dict[str, list[ast.Assign]]] = {}

    def module(self, path: str) -> Module | None:
        """The module at a path below the package; None where there is none or it does not parse."""
        if path not in self._modules:
            self._modules[path] = self._parse(path)
        return self._modules[path]

    def find_class(self, place: str) -> ClassRef | None:
        """The class of "srt/file.py::Class"."""
        path, _, name = place.partition("::")
        module = self.module(path)
        found = self.lookup(module, name) if module else None
        return found if isinstance(found, ClassRef) else None

    def find_function(self, place: str) -> tuple[FunctionRef, ClassRef | None] | None:
        """The function of "srt/file.py::Class.method", inherited ones too, or "srt/file.py::function"; its class."""
        path, _, name = place.partition("::")
        owner, _, method = name.rpartition(".")
        if owner:
            cls = self.find_class(f"{path}::{owner}")
            found = self.method(cls, method) if cls else None
            return (found, cls) if found else None
        module = self.module(path)
        function = self.lookup(module, name) if module else None
        return (function, None) if isinstance(function, FunctionRef) else None

    def lookup(self, module: Module, name: str, seen: frozenset[str] = frozenset()) -> Named | None:
        """What a top-level name of a module stands for, imports followed to their end."""
        node = module.names.get(name)
        if f"{module.path}:{name}" in seen:
            return None
        if node is None:
            further = seen | {f"{module.path}:{name}"}
            homes = [self._named(self._source(module, star)) for star in module.stars]
            found = [self.lookup(home, name, further) for home in homes if isinstance(home, Module)]
            return next((one for one in found if one is not None), None)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.imported(module, node, name, seen | {f"{module.path}:{name}"})
        if isinstance(node, ast.ClassDef):
            return ClassRef(module, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return FunctionRef(module, node)
        return node if isinstance(node, ast.expr) else None

    def imported(
        self, module: Module, node: ast.Import | ast.ImportFrom, name: str, seen: frozenset[str] = frozenset()
    ) -> Named | None:
        """What an import statement binds to `name`."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) == name:
                    return self._named(alias.name if alias.asname else name)
            return None
        start = self._source(module, node)
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return self._member(start, alias.name, seen)
        return None

    @staticmethod
    def _source(module: Module, node: ast.ImportFrom) -> str:
        """The dotted name of what a `from` imports from."""
        base = ".".join([*module.dotted[: len(module.dotted) - node.level + 1], *filter(None, [node.module])])
        return base if node.level else node.module or ""

    def _member(self, dotted: str, name: str, seen: frozenset[str]) -> Named | None:
        home = self._named(dotted)
        if isinstance(home, Module):
            found = self.lookup(home, name, seen)
            return found if found is not None else self._inside(f"{dotted}.{name}")
        return self._named(f"{dotted}.{name}")

    def _named(self, dotted: str) -> Named | None:
        inside = dotted == PACKAGE or dotted.startswith(f"{PACKAGE}.")
        return self._inside(dotted) if inside else External(dotted)

    def _inside(self, dotted: str) -> Module | None:
        path = "/".join(dotted.split(".")[1:])
        return self.module(f"{path}.py") or self.module(f"{path}/__init__.py" if path else "__init__.py")

    def attribute(self, module: Module, name: str) -> Named | None:
        """`module.name`: a top-level name, else a submodule."""
        found = self.lookup(module, name)
        if found is not None or not module.path.endswith("__init__.py"):
            return found
        return self._inside(".".join([*module.dotted, name]))

    def bases(self, cls: ClassRef) -> list[ClassRef]:
        """The class and those it inherits from inside the package, nearest first."""
        if cls.place not in self._bases:
            todo, found = [cls], self._bases.setdefault(cls.place, [])
            while todo:
                one = todo.pop(0)
                if one not in found:
                    found.append(one)
                    named = [self.expression(one.module, base) for base in one.node.bases]
                    todo += [base for base in named if isinstance(base, ClassRef)]
        return self._bases[cls.place]

    def expression(self, module: Module, node: ast.expr) -> Named | None:
        """A dotted name at a module's top level."""
        if isinstance(node, ast.Name):
            return self.lookup(module, node.id)
        if isinstance(node, ast.Attribute):
            base = self.expression(module, node.value)
            if isinstance(base, Module):
                return self.attribute(base, node.attr)
            if isinstance(base, External):
                return External(f"{base.name}.{node.attr}")
        return None

    def members(self, cls: ClassRef, name: str) -> Iterator[tuple[ClassRef, FunctionRef | ast.AnnAssign | ast.Assign]]:
        """What a class and its bases define under a name and which of them does, nearest first."""
        for one in self.bases(cls):
            for node in self._bodies(one).get(name, []):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield one, FunctionRef(one.module, node, one)
                else:
                    yield one, node

    def method(self, cls: ClassRef, name: str, above: ClassRef | None = None) -> FunctionRef | None:
        """The method that an object of the class has under a name; as super() in `above` finds it."""
        order = self.bases(cls)
        nearest = order.index(above) + 1 if above in order else 0
        for one, member in self.members(cls, name):
            if isinstance(member, FunctionRef) and order.index(one) >= nearest:
                return member
        return None

    def assigned(self, cls: ClassRef, name: str) -> Iterator[Store]:
        """What a class's methods, inherited ones too, assign to self.name."""
        for one in self.bases(cls):
            if one.place not in self._stores:
                self._stores[one.place] = _stores(one)
            yield from self._stores[one.place].get(name, [])

    def locals(self, function: FunctionRef) -> dict[str, list[ast.Assign]]:
        """Assignments to the local names of a function."""
        if function.node not in self._locals:
            found = self._locals[function.node] = {}
            for node in ast.walk(function.node):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, []).append(node)
        return self._locals[function.node]

    def _bodies(self, cls: ClassRef) -> dict[str, list[Function | ast.AnnAssign | ast.Assign]]:
        """Definitions in the body of one class by name."""
        if cls.place not in self._members:
            found: dict[str, list[Function | ast.AnnAssign | ast.Assign]] = {}
            for node in cls.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.AnnAssign | ast.Assign):
                    for name in _targets(node):
                        found.setdefault(name, []).append(node)
            self._members[cls.place] = found
        return self._members[cls.place]

    def is_a(self, cls: ClassRef, other: ClassRef) -> bool:
        """Whether `cls` is or inherits from `other`."""
        return any(one.place == other.place for one in self.bases(cls))

    @cached_property
    def ops(self) -> dict[str, FunctionRef]:
        """torch ops of the overlay by name, each with what runs on CUDA.

        The overlay registers them from tuples (name, CUDA function, CPU function); that form is what is read.
        """
        found = {}
        for file in sorted((self.package / "srt" / "treeverify").rglob("*.py")):
            module = self.module(file.relative_to(self.package).as_posix())
            if module is None or b"torch.library.Library" not in file.read_bytes():
                continue
            for node in ast.walk(module.tree):
                match node:
                    case ast.Tuple(elts=[ast.Constant(value=str(name)), ast.Name(id=cuda), ast.Name()]):
                        function = self.lookup(module, cuda)
                        if isinstance(function, FunctionRef):
                            found[f"torch.ops.treeverify.{name}"] = function
        return found

    def _parse(self, path: str) -> Module | None:
        file = self.package / path
        if not file.is_file():
            return None
        tree = _tree(file.read_bytes())
        if tree is None:
            return None
        module = Module(path, tree)
        for node in _top_level(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                    module.stars.append(node)
                for alias in node.names:
                    bound = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
                    module.names[bound] = node
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                module.names[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for name in _targets(node):
                    module.names.setdefault(name, node.value)
        return module


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those inside `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


@functools.lru_cache(maxsize=1024)
def _tree(source: bytes) -> ast.Module | None:
    """Nobody changes it, so trees of SGLang that share a file share this too."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _stores(cls: ClassRef) -> dict[str, list[Store]]:
    """What the class's own methods assign to attributes of self, by the attribute."""
    found: dict[str, list[Store]] = {}
    for method in cls.node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        ref, own = FunctionRef(cls.module, method, cls), method.args.args[0].arg
        for node in ast.walk(method):
            if isinstance(node, ast.AnnAssign) and _of(node.target, own):
                found.setdefault(_of(node.target, own), []).append(Store(ref, node.annotation, None))
            elif isinstance(node, ast.Assign):
                for target, value in [pair for one in node.targets for pair in _pairs(one, node.value)]:
                    if name := _of(target, own):
                        found.setdefault(name, []).append(Store(ref, None, value))
    return found


def _of(target: ast.expr, own: str) -> str:
    """The attribute of `own` that is assigned to, "" for other targets."""
    match target:
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == own:
            return attr
    return ""


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with their values, tuples taken apart where both are written out."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            yield from zip(targets, values, strict=True)
        case _:
            yield target, value
