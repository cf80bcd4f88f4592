# SPDX-License-Identifier: Apache-2.0
"""Every test here runs for every pin, those in a pin's folder, or marked pin, for that pin alone.

One worker process for the patched tree and one for the stock tree of a pin; see tests/support/worker.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from applier.layout import CHECKOUT
from applier.pin import Pin, load_pins
from trees import patched_copy, released, stock_copy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from worker import Worker

PINS = {pin.name.replace(".", "_"): pin for pin in load_pins(CHECKOUT)}
"""By the folder of a pin's own tests."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which pins a test is for."""
    if "each_pin" in metafunc.fixturenames:
        folder = metafunc.definition.path.parent.name
        pins = [PINS[folder]] if folder in PINS else list(PINS.values())
        if marker := metafunc.definition.get_closest_marker("pin"):
            pins = [pin for pin in pins if pin.name in marker.args]
        metafunc.parametrize("each_pin", pins, indirect=True, ids=lambda pin: pin.name, scope="session")


@pytest.fixture(scope="session")
def each_pin(request: pytest.FixtureRequest) -> Pin:
    """The pin of this run of the test."""
    pin: Pin = request.param
    return pin


@pytest.fixture(scope="session")
def patched_package(each_pin: Pin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the patched package, for PYTHONPATH."""
    return patched_copy(released(each_pin), tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="session")
def patched(patched_package: Path) -> Iterator[Worker]:
    """Calls functions where the patched SGLang is imported."""
    worker = Worker(patched_package)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def stock(each_pin: Pin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Calls functions where SGLang as released is imported."""
    worker = Worker(stock_copy(released(each_pin), tmp_path_factory.mktemp("stock")))
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def _where_trees_are_drafted(request: pytest.FixtureRequest) -> None:
    """Skips tests marked ddtree, with the reason shown, for a pin that has no DDTREE."""
    if request.node.get_closest_marker("ddtree"):
        pin: Pin = request.getfixturevalue("each_pin")
        if not list(pin.folder.glob("*-ddtree.patch")):
            pytest.skip(f"no DDTREE on {pin.name} yet")
