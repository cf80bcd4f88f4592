# SPDX-License-Identifier: Apache-2.0
"""The tool under every Python it is for, those the machine has: from PATH, pyenv or uv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from applier.commands import require_python
from applier.errors import UsageError
from applier.obtain import wheel_choices
from applier.pin import Pin, load_pin
from applier.requirements import allows, readable
from checkout import Checkout, tree_hash

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def interpreter(version: str) -> str | None:
    """One of that version, None where there is none."""
    candidates = [sys.executable, f"python{version}"]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout.strip()
        candidates += [str(path) for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python"))]
    if shutil.which("uv"):
        find = ["uv", "python", "find", "--no-python-downloads", version]
        candidates += subprocess.run(find, capture_output=True, text=True, check=False).stdout.split()
    for candidate in candidates:
        path = shutil.which(candidate)
        says = path and subprocess.run([path, "-V"], capture_output=True, text=True, check=False).stdout
        if says and says.startswith(f"Python {version}."):
            return path
    return None


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tool can't do without, in pure Python: the same folder serves every interpreter."""
    folder = tmp_path_factory.mktemp("modules")
    pure = ["--only-binary=:all:", "--implementation", "py", "--abi", "none", "--platform", "any"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *pure]
    subprocess.run([*command, "--python-version", "3.10", "unidiff>=0.7.5", "tomli>=2"], check=True)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_round_trip(checkout: Checkout, modules: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    environment = checkout.env({"PYTHONPATH": str(modules), "TREEVERIFY_NO_BOOTSTRAP": "1", "PYTHONWARNINGS": "error"})

    def run(*arguments: str) -> str:
        command = [python, *checkout.command(*arguments)[1:]]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert ended.returncode == 0 and "Warning" not in ended.stderr, ended.stderr
        return ended.stdout

    before = tree_hash(checkout.package)
    run("apply", "--no-build")
    assert json.loads(run("status", "--json"))["state"] == "applied"
    run("revert")
    assert tree_hash(checkout.package) == before


def test_a_python_the_release_is_not_for_does_not_serve(checkout: Checkout) -> None:
    path = checkout.pin / "pin.toml"
    path.write_text(path.read_text().replace('">=3.10"', '">=3.10,<3.11"'))
    pin = load_pin(checkout.pin)
    for version in VERSIONS:
        if (python := interpreter(version)) is None or allows(pin.requires_python, version):
            continue
        with pytest.raises(UsageError, match=r"sglang 1.0 is for >=3.10,<3.11: name another with --python"):
            require_python(python, pin, [])
    require_python(str(Path("/nonexistent/python")), pin, [])  # whoever starts it says that it does not run


def test_wheels_are_fetched_for_a_python_the_release_is_for(pin: Pin, checkout: Checkout) -> None:
    """Each choice names one to pip; the one that runs comes first where it is one of them."""
    for requires in (">=3.10", ">=3.12", "==3.11", "<3.11"):
        path = checkout.pin / "pin.toml"
        checkout.write_pin()
        path.write_text(path.read_text().replace(">=3.10", requires))
        choices = wheel_choices(load_pin(checkout.pin))
        named = [choice[choice.index("--python-version") + 1] for choice in choices]
        assert set(named) == {version for version in VERSIONS if allows(requires, version)}
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert named[0] == here or not allows(requires, here)
    assert allows(pin.requires_python, f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.mark.parametrize(
    ("specifier", "python", "expected"),
    [
        (">=3.10", "3.10", True),
        (">=3.10", "3.9.18", False),
        (">=3.10,<3.13", "3.12.7", True),
        (">=3.10, <3.13", "3.13.0", False),
        (">3.11", "3.11", False),
        ("==3.11", "3.11", True),
    ],
)
def test_requires_python(specifier: str, python: str, expected: bool) -> None:
    assert readable(specifier) and allows(specifier, python) is expected


@pytest.mark.parametrize("specifier", ["", "3.10", "~=3.10", ">=3.10;", ">=", "!=3.11", ">=3.x"])
def test_requires_python_that_can_not_be_read_is_told(checkout: Checkout, specifier: str) -> None:
    path = checkout.pin / "pin.toml"
    path.write_text(path.read_text().replace(">=3.10", specifier))
    with pytest.raises(UsageError, match="requires_python is"):
        load_pin(checkout.pin)


def test_without_git_a_checkout_is_patched_all_the_same(checkout: Checkout, tmp_path: Path) -> None:
    """Neither the program nor GitPython is there; the tree has a .git."""
    git = checkout.package.parent / ".git"
    git.mkdir()
    empty = tmp_path / "bin"
    empty.mkdir()
    without = {"PATH": str(empty), "TREEVERIFY_NO_BOOTSTRAP": "1", "GIT_PYTHON_REFRESH": "quiet"}
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--no-build", **without).returncode == 0
    assert checkout.run("status", **without).returncode == 0
    assert checkout.run("revert", **without).returncode == 0
    assert tree_hash(checkout.package) == before
    assert os.listdir(git) == []
