# SPDX-License-Identifier: Apache-2.0
"""How the lint gets from an entry to a call: what it follows, what it leaves out, and the way it reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from capture.findings import Finding

Lint = Callable[..., list[Finding]]

READ = "import torch\n\n\ndef read(t: torch.Tensor):\n    return t.item()\n"


def places(found: list[Finding]) -> set[tuple[str, int]]:
    return {(one.file, one.line) for one in found}


@pytest.mark.parametrize(
    "call",
    [
        "from sglang.srt.deep import read\n\n\ndef step(t):\n    read(t)\n",
        "from sglang.srt import deep\n\n\ndef step(t):\n    deep.read(t)\n",
        "import sglang.srt.deep as d\n\n\ndef step(t):\n    d.read(t)\n",
        "from .deep import read as r\n\n\ndef step(t):\n    r(t)\n",
        "from . import deep\n\n\ndef step(t):\n    deep.read(t)\n",
        "def step(t):\n    from sglang.srt.deep import read\n\n    read(t)\n",
        "from .deep import read\n\nalias = read\n\n\ndef step(t):\n    alias(t)\n",
        "from .deep import read\n\n\ndef step(t):\n    def inner():\n        read(t)\n\n    inner()\n",
        "from .deep import read\n\n\ndef step(t):\n    return [read(x) for x in (t, t)]\n",
        "from .deep import read\n\n\ndef step(t):\n    with torch.no_grad():\n        read(t)\n",
        "from .deep import *\n\n\ndef step(t):\n    read(t)\n",
        "from functools import partial as p\n\nfrom .deep import read\n\n\ndef step(t):\n    p(read, t)()\n",
        "import functools\n\nfrom .deep import read\n\n\ndef step(t):\n    functools.partial(read, t=t)\n",
        "from .deep import read\n\n\ndef step(t):\n    return list(map(read, [t]))\n",
        "import threading\n\nfrom .deep import read\n\n\ndef step(t):\n    threading.Thread(target=read).start()\n",
        "from .deep import read\n\n\ndef step(t):\n    def inner():\n        read(t)\n\n    t.register_hook(inner)\n",
    ],
)
def test_functions_are_followed(lint: Lint, call: str) -> None:
    found = lint({"srt/m.py": call, "srt/deep.py": READ})
    assert places(found) == {("srt/deep.py", 5)} and found[0].source == "t.item()"


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_what_with_calls(lint: Lint, name: str) -> None:
    other = {"__enter__": "__exit__", "__exit__": "__enter__"}[name]
    text = f"""
        import torch

        class Guard:
            def __init__(self, t: torch.Tensor):
                self.t = t
            def {name}(self, *args):
                self.t.item()
            def {other}(self, *args):
                return self.t

        def step(t: torch.Tensor):
            with Guard(t) as given:
                return given
    """
    assert [one.source for one in lint({"srt/m.py": text})] == ["self.t.item()"]


def test_a_function_that_is_asked_about_is_not_called(lint: Lint) -> None:
    step = "from .deep import read\n\n\ndef step(t):\n    return callable(read) and hasattr(read, 'x')\n"
    assert lint({"srt/m.py": step, "srt/deep.py": READ}) == []


CLASSES = """\
import torch
from typing import NamedTuple, Optional


class Base:
    def __init__(self, size: int):
        self.helper = Helper()
        self.left, self.right = Helper(), None

    def step(self, t: torch.Tensor, other: Optional["Helper"] = None):
        {body}

    def inherited(self, t):
        return t.cpu()

    @property
    def length(self):
        return self.lengths.item()

    @classmethod
    def made(cls, t):
        return t.tolist()

    @staticmethod
    def plain(t):
        return t.numpy()


class Helper:
    def read(self, t):
        return t.item()

    def __call__(self, t):
        return t.item()


class Between(Base):
    pass


class Derived(Between):
    def step(self, t: torch.Tensor, other=None):
        super().step(t, other)

    def hook(self, t):
        return t.item()

    def upwards(self, t):
        return super().inherited(t)
"""


@pytest.mark.parametrize(
    ("body", "source"),
    [
        ("self.inherited(t)", "t.cpu()"),
        ("self.hook(t)", "t.item()"),
        ("self.upwards(t)", "t.cpu()"),
        ("self.helper.read(t)", "t.item()"),
        ("self.left.read(t)", "t.item()"),
        ("self.helper(t)", "t.item()"),
        ("other.read(t)", "t.item()"),
        ("h = Helper(); h.read(t)", "t.item()"),
        ("return self.length", "self.lengths.item()"),
        ("self.made(t)", "t.tolist()"),
        ("Base.plain(t)", "t.numpy()"),
        ("run = self.helper.read; run(t)", "t.item()"),
        ("getattr(self, 'helper').read(t)", "t.item()"),
    ],
)
def test_methods_are_followed(lint: Lint, body: str, source: str) -> None:
    found = lint({"srt/m.py": CLASSES.format(body=body)}, "srt/m.py::Derived.step")
    assert [one.source for one in found] == [source]
    assert [step.function for step in found[0].path[:2]] == ["Derived.step", "Base.step"]


def test_the_way_is_reported(lint: Lint) -> None:
    modules = {"srt/m.py": "from .a import go\n\n\ndef step(t):\n    go(t)\n"}
    modules["srt/a.py"] = "from .deep import read\n\n\ndef go(t):\n    read(t)\n"
    (found,) = lint({**modules, "srt/deep.py": READ})
    way = [(step.function, step.file, step.line) for step in found.path]
    assert way == [("step", "srt/m.py", 4), ("go", "srt/m.py", 5), ("read", "srt/a.py", 5)]
    assert (found.function, found.rule, found.region) == ("read", "host-read", "here")


def test_files_out_of_scope_are_not_followed(lint: Lint, tmp_path: Path) -> None:
    (tmp_path / "sglang/srt").mkdir(parents=True)
    (tmp_path / "sglang/srt/deep.py").write_text(READ)
    assert lint({"srt/m.py": "from .deep import read\n\n\ndef step(t):\n    read(t)\n"}) == []


@pytest.mark.parametrize(
    ("body", "assume", "found"),
    [
        ("if mode.is_verify():\n        return\n    t.item()", {"mode.is_verify()": True}, False),
        ("if mode.is_verify():\n        return\n    t.item()", {}, True),
        ("if not self.on:\n        t.item()", {"self.on": True}, False),
        ("if mode.is_verify() and n:\n        t.item()", {"mode.is_verify()": False}, False),
        ("if n or mode.is_verify():\n        pass\n    else:\n        t.item()", {"mode.is_verify()": True}, False),
        ("x = t.item() if mode.is_verify() else n", {"mode.is_verify()": False}, False),
        ("while mode.is_verify():\n        t.item()", {"mode.is_verify()": False}, False),
        ("return\n    t.item()", {}, False),
        ("if n:\n        return\n    else:\n        return\n    t.item()", {}, False),
        ("if n:\n        return\n    t.item()", {}, True),
        ("for _ in n:\n        if n:\n            continue\n        t.item()", {}, True),
        ("try:\n        pass\n    except ValueError:\n        t.item()", {}, True),
        ("try:\n        pass\n    except ValueError:\n        t.item()\n        raise", {}, False),
        ("first = True\n    for _ in n:\n        if not first:\n            t.item()\n        first = False", {}, True),
        ("if flag:\n        t.item()", {}, True),
    ],
)
def test_branches(lint: Lint, body: str, assume: dict[str, bool], found: bool) -> None:
    text = f"import torch\n\n\ndef step(self, t: torch.Tensor, mode, n, flag=False):\n    {body}\n"
    assert bool(lint({"srt/m.py": text}, assume=assume)) is found


def test_a_default_counts_inside(lint: Lint) -> None:
    """An entry may be called with anything; a call that is seen passes what it passes."""
    inner = "def inner(t: torch.Tensor, wait=False, out=None):\n    if wait or out is not None:\n        t.item()\n"
    calls = {"inner(t)": False, "inner(t, True)": True, "inner(t, out=t)": True, "inner(t, **k)": True}
    for call, found in calls.items():
        text = f"import torch\n\n\n{inner}\n\ndef step(t, k):\n    {call}\n"
        assert bool(lint({"srt/m.py": text})) is found, call


def test_places_of_classes(lint: Lint) -> None:
    """[types] says what an attribute holds, [concrete] which class an annotation stands for."""
    text = """\
        import torch

        class Abstract:
            def run(self, t): ...

        class Real(Abstract):
            def run(self, t):
                return t.item()

        class Backend:
            def step(self, t: torch.Tensor, given: Abstract):
                if self.hook is not None:
                    return self.hook.run(t)
                return given.run(t)
        """
    module, entry, real = {"srt/m.py": text}, "srt/m.py::Backend.step", ("srt/m.py::Real",)
    assert lint(module, entry) == []
    assert lint(module, entry, types={"Backend.hook": real})[0].path[-1].line == 13
    assert lint(module, entry, concrete={"Abstract": real})[0].path[-1].line == 14


def test_ops_of_the_overlay(lint: Lint) -> None:
    """torch.ops.treeverify.<name> is the function registered for CUDA."""
    ops = """\
        import torch

        lib = torch.library.Library("treeverify", "DEF")

        def _cuda(*args):
            args[0].item()

        def _cpu(*args):
            args[0].tolist()

        for name, cuda, cpu in (("walk", _cuda, _cpu),):
            lib.impl(name, cuda, "CUDA")
        """
    step = "import torch\n\n_walk = torch.ops.treeverify.walk.default\n\n\ndef step(t: torch.Tensor):\n    _walk(t)\n"
    (found,) = lint({"srt/m.py": step, "srt/treeverify/ops.py": ops})
    assert (found.file, found.source) == ("srt/treeverify/ops.py", "args[0].item()")


def test_functions_that_call_themselves_end(lint: Lint) -> None:
    text = "def step(t, n=0):\n    if n:\n        return step(t, n)\n    return t.item()\n"
    assert [one.rule for one in lint({"srt/m.py": text})] == ["host-read"]
