# SPDX-License-Identifier: Apache-2.0
"""Starting from an interpreter that has nothing, and from one that has everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from applier import bootstrap
from applier.errors import UsageError
from applier.obtain import fetch_wheel, unpack_release
from applier.pin import Pin
from applier.requirements import satisfied
from checkout import ROOT, Checkout, tree_hash


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python with the standard library and nothing else, not even pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare/bin/python")


def run(checkout: Checkout, python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python, *checkout.command(*arguments)[1:]]
    return subprocess.run(command, capture_output=True, text=True, env=checkout.env(environment), check=False)


def test_a_bare_python_makes_its_own_environment_once(checkout: Checkout, bare: str) -> None:
    before = tree_hash(checkout.package)
    first = run(checkout, bare, "apply", "--no-build")
    assert first.returncode == 0, first.stderr
    assert "setting up build/venv-apply" in first.stderr
    second = run(checkout, bare, "revert")
    assert second.returncode == 0 and second.stderr == ""
    assert tree_hash(checkout.package) == before
    (checkout.package / "launch_server.py").write_text("import sys\nprint(sys.executable)\n")
    assert run(checkout, bare, "apply", "--arch", "120").returncode == 0
    served = run(checkout, bare, "serve", "--", "x")
    assert served.stdout.splitlines()[-1] == bare, "SGLang runs in the Python that was asked, not in ours"
    assert f"{bare} lacks torch" in served.stderr and "pip install sglang==" in served.stderr


def test_without_network_it_says_what_is_missing(checkout: Checkout, bare: str) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    before = tree_hash(checkout.package)
    refused = run(checkout, bare, "check", **offline)
    missing = "tomli, unidiff" if sys.version_info < (3, 11) else "unidiff"
    assert refused.returncode == 2 and f"missing Python modules: {missing}" in refused.stderr
    assert tree_hash(checkout.package) == before
    off = run(checkout, bare, "check", TREEVERIFY_NO_BOOTSTRAP="1")
    assert off.returncode == 2 and "TREEVERIFY_NO_BOOTSTRAP" in off.stderr
    assert not (checkout.root / "build").exists() or not list((checkout.root / "build").rglob(bootstrap.STAMP))


def test_a_python_that_has_everything_is_used_as_it_is(checkout: Checkout) -> None:
    assert checkout.run("apply", "--no-build").returncode == 0
    assert not (checkout.root / "build").exists()


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Another interpreter: the same Python as an installation of its own, with another base prefix."""
    prefix = tmp_path / "other"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python3").symlink_to(Path(sys.base_prefix) / "bin/python3")
    (prefix / "lib").symlink_to(Path(sys.base_prefix) / "lib")
    python = str(prefix / "bin/python3")
    told = subprocess.run(
        [python, "-c", "import sys; print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHOME": str(prefix)},
    )
    assert told.stdout.strip() == str(prefix) != sys.base_prefix
    return python


def make(python: str, folder: Path, *requirements: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """bootstrap.environment, asked for by an interpreter."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path\nfrom applier import bootstrap\nfrom applier.errors import UsageError\n"
        f"try: print(bootstrap.environment(Path({str(folder)!r}), {list(requirements)!r}, 'a test'))\n"
        "except UsageError as error: sys.exit(error.message)\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **changes}
    return subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=False)


HAD = "pip"  # a requirement that a new environment meets
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete environment with HAD, to be copied: making one takes seconds."""
    folder = tmp_path_factory.mktemp("whole") / "venv"
    made = make(sys.executable, folder, HAD)
    assert made.returncode == 0 and "setting up" in made.stderr, made.stderr
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, alone in a folder."""
    return Path(shutil.copytree(whole, tmp_path / "made/venv", symlinks=True))


@pytest.mark.parametrize("stamp", [None, "python 3.10 /somewhere/else\n"], ids=["new", "an older checkout's stamp"])
def test_an_environment_serves_whatever_interpreter_asks(other: str, folder: Path, stamp: str | None) -> None:
    if stamp:
        (folder / bootstrap.STAMP).write_text(stamp + HAD)
    before = tree_hash(folder)
    again = make(other, folder, HAD, PYTHONHOME=str(Path(other).parents[1]), **OFFLINE)
    assert again.returncode == 0 and again.stderr == ""
    assert again.stdout.strip() == str(folder / "bin/python")
    assert tree_hash(folder) == before


def test_an_environment_is_kept_until_the_new_one_is_complete(folder: Path) -> None:
    before = tree_hash(folder)
    failed = make(sys.executable, folder, "no-such-package==1", **OFFLINE)
    assert failed.returncode == 1 and "could not install no-such-package" in failed.stderr
    assert tree_hash(folder) == before and [path.name for path in folder.parent.iterdir()] == ["venv"]

    aside = folder.with_name("venv.before")  # as after a kill in the middle
    folder.rename(aside)
    (folder / "bin").mkdir(parents=True)
    assert make(sys.executable, folder, HAD, **OFFLINE).stderr == ""
    assert tree_hash(folder) == before and not aside.exists()


def test_a_half_made_environment_is_made_again(folder: Path) -> None:
    (folder / bootstrap.STAMP).unlink()
    (folder / "bin/python").unlink()
    (folder / "bin/python").write_text("not a program")
    assert make(sys.executable, folder, HAD).returncode == 0
    assert (folder / bootstrap.STAMP).is_file()
    assert subprocess.run([folder / "bin/python", "-c", "import pip"], check=False).returncode == 0


def test_an_environment_whose_interpreter_is_gone_is_made_again(folder: Path, tmp_path: Path) -> None:
    for link in (folder / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(tmp_path / "gone")
    again = make(sys.executable, folder, HAD)
    assert again.returncode == 0 and "setting up" in again.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["venv"]
    assert subprocess.run([folder / "bin/python", "-c", "import pip"], check=False).returncode == 0


@pytest.mark.parametrize("damage", ["truncated", "torn", "text"])
def test_a_damaged_wheel_in_the_cache_is_fetched_again(
    pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """From a folder of wheels in place of the index."""
    good = fetch_wheel(pin)
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(good.parent))
    bad = tmp_path / "cache/wheels" / good.name
    bad.parent.mkdir(parents=True)
    data = bytearray(good.read_bytes())
    data[100_000:100_400] = bytes(400)
    bad.write_bytes({"truncated": good.read_bytes()[:500_000], "torn": bytes(data), "text": b"no wheel"}[damage])
    assert fetch_wheel(pin).read_bytes() == good.read_bytes()
    assert "is damaged and deleted" in capsys.readouterr().err
    assert [path.name for path in bad.parent.iterdir()] == [good.name]


@pytest.mark.skipif(not Path("/usr/bin/apt-get").exists(), reason="no apt-get here")
def test_without_root_the_exact_line_is_printed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.touch()
    told.chmod(0o666)
    with told.open("w") as file:
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                bootstrap.apt_install(["g++"], "nvcc")
            except UsageError as error:
                file.write(error.message)
                file.flush()
            os._exit(0)
        os.waitpid(child, 0)
    assert "sudo sh -c 'apt-get update && apt-get install -y g++'" in told.read_text()


def test_the_made_tree_is_deterministic(pin: Pin, pristine: Path, tmp_path: Path) -> None:
    unpack_release(pin, fetch_wheel(pin), tmp_path / "again")
    heads = [
        subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        for tree in (pristine, tmp_path / "again")
    ]
    assert heads[0] == heads[1]
    assert tree_hash(pristine) == tree_hash(tmp_path / "again")
    clean = subprocess.run(["git", "-C", pristine, "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert clean.stdout == ""


def test_requirements_are_read() -> None:
    have = f"pytest>=8\n# a comment\n\npytest=={pytest.__version__}  # exact\nnosuch==1; python_version < '3.0'"
    assert satisfied(have.splitlines())
    for line in ("no-such-package", "pytest==0.0.1", "pytest>=9999", "pytest ~= 1", "nosuch; python_version >= '3.0'"):
        assert not satisfied([line]), line
