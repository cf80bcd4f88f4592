# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests: real SGLang trees, and the gpu marker."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from applier.layout import CHECKOUT
from applier.pin import Pin, choose_pin
from trees import patched_copy, released, stock_copy

LONGEST = ("patches", "kit/test_training.py", "kit/test_acceptance.py", "apply/test_bootstrap.py")
"""Where tests run side by side these begin. Those of patches share two processes a pin that have SGLang imported."""


def pytest_configure() -> None:
    """How long an example of hypothesis takes says nothing of the code where others use the cores."""
    with contextlib.suppress(ImportError):  # a machine that runs gpu tests alone may lack it
        from hypothesis import HealthCheck, settings

        settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("shared cores")


def _group(nodeid: str) -> str:
    """What one process runs: a file, or all of patches/ for a pin."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    if not file.startswith("patches/"):
        return file
    pin = re.search(r"\[(?:.*-)?(v\d[.\w]*)", nodeid)
    return f"patches {pin[1]}" if pin else "patches"


def _rank(nodeid: str) -> int:
    """Where its group stands in LONGEST."""
    kind = _group(nodeid).partition(" ")[0]
    return LONGEST.index(kind) if kind in LONGEST else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-n` hands out groups, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips gpu tests, with the reason shown, where torch has no GPU. With `-n` the longest groups come first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item.nodeid))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session")
def pin() -> Pin:
    """The default pin."""
    return choose_pin(CHECKOUT, None)


@pytest.fixture(scope="session")
def pristine(pin: Pin) -> Path:
    """The release as a git repository. Nobody writes to it."""
    return released(pin)


@pytest.fixture
def sglang_tree(pristine: Path, tmp_path: Path) -> Path:
    """A repository of its own with python/sglang as released."""
    return Path(shutil.copytree(pristine, tmp_path / "sglang", symlinks=True))


@pytest.fixture(scope="session")
def stock_tree(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package as released, for PYTHONPATH."""
    return stock_copy(pristine, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def patched_tree(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the patched package, for PYTHONPATH."""
    return patched_copy(pristine, tmp_path_factory.mktemp("patched"))
