# SPDX-License-Identifier: Apache-2.0
"""Getting what is missing, on a machine that has nothing but python3: private environments under build/.

Standard library only: this runs before anything else can be imported. TREEVERIFY_NO_BOOTSTRAP=1 turns it off.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from applier.errors import UsageError
from applier.layout import CHECKOUT
from applier.lock import locked
from applier.say import note

ORIGINAL = "TREEVERIFY_PYTHON"  # the interpreter the user started, kept across the change to our own
TOOLS = {
    "unidiff": "unidiff>=0.7.5",
    "git": "GitPython>=3.1",
    "rich": "rich>=13",
    "ninja": "ninja>=1.11",
    "tomli": 'tomli>=2; python_version < "3.11"',
}
STAMP = "treeverify-stamp"


def users_python() -> str:
    """The interpreter that was asked to run us; SGLang lives there, not in our own environment."""
    return os.environ.get(ORIGINAL, sys.executable)


def require(needed: Iterable[str], useful: Iterable[str] = ()) -> None:
    """Goes on where the modules are importable; else makes build/venv-apply and starts over in it.

    Without `useful` modules the command still works, so offline it only says what is missing.
    """
    needed = [name for name in needed if not _importable(name)]
    useful = [name for name in useful if not _importable(name)]
    if not needed and not useful:
        return
    python = None
    try:
        if _off():
            raise UsageError("TREEVERIFY_NO_BOOTSTRAP is set")
        python = environment(CHECKOUT.build / "venv-apply", list(TOOLS.values()), "the patch tool")
        if Path(sys.prefix).resolve() == python.parent.parent.resolve():
            raise UsageError(
                f"{python} lacks {', '.join([*needed, *useful])}; delete {python.parent.parent} and try again"
            )
    except UsageError as error:
        if needed:
            raise UsageError(f"missing Python modules: {', '.join(needed)}; {error.message}", error.details) from None
        note(f"going on without {', '.join(useful)}: {error.message}")
        return
    os.environ.setdefault(ORIGINAL, sys.executable)
    os.execv(python, [str(python), *sys.orig_argv[1:]])


def environment(folder: Path, requirements: list[str], purpose: str, installs: list[list[str]] | None = None) -> Path:
    """A virtual environment with these requirements, made once; gives its python. UsageError where that fails.

    It runs by itself, so any interpreter may ask for it. One that has other requirements is kept until the new one is
    complete (scripts hold their own path, so the new one is made in place and the old one moved aside meanwhile).
    `installs` are pip argument lists to run in order instead of one install of `requirements`.
    """
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    aside = folder.with_name(f"{folder.name}.before")
    wanted = "\n".join(requirements)
    if _same(stamp, wanted) and _runs(python):
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent, timeout=3600, waiting=note):
        if aside.exists() and not stamp.exists():
            _move(aside, folder)  # a run was killed before its environment was complete
        if _same(stamp, wanted) and _runs(python):
            return python
        _provide_venv_module()
        note(f"setting up {_short(folder)} for {purpose} (once) …")
        if stamp.exists():
            _move(folder, aside)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _run([sys.executable, "-m", "venv", str(folder)], f"could not make {folder}")
            for arguments in installs or [requirements]:
                _run(
                    [*_pip(python), "install", "--quiet", *arguments],
                    f"could not install {' '.join(arguments)}",
                )
            stamp.write_text(wanted, encoding="utf-8")
        except BaseException:
            if aside.exists():
                _move(aside, folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    return python


def _move(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    os.replace(folder, to)


def pip_command() -> list[str]:
    """pip of this interpreter, or of our own environment where it has none (as Debian's)."""
    if _importable("pip"):
        return _pip(Path(sys.executable))
    return _pip(environment(CHECKOUT.build / "venv-apply", list(TOOLS.values()), "the patch tool"))


def pip_install(folder: Path, packages: list[str], why: str) -> None:
    """Packages unpacked into a folder that no interpreter looks into by itself; whole or not at all."""
    if _off():
        raise UsageError(f"TREEVERIFY_NO_BOOTSTRAP is set, so {', '.join(packages)} was not fetched")
    note(why)
    scratch = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        install = ["install", "--quiet", "--no-deps", "--target", str(scratch), *packages]
        _run([*pip_command(), *install], f"could not fetch {', '.join(packages)}")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def apt_install(packages: list[str], purpose: str) -> None:
    """Debian packages, as root at once; otherwise UsageError with the line to type."""
    line = f"apt-get update && apt-get install -y {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise UsageError(f"{purpose} needs {', '.join(packages)}; install it with your system's package manager")
    if os.geteuid() != 0 or _off():
        raise UsageError(f"{purpose} needs {', '.join(packages)}; run: sudo sh -c '{line}'")
    note(f"installing {', '.join(packages)} with apt-get for {purpose} …")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-qq"], "apt-get update failed", quiet)
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    _run(install, f"could not install; try by hand: {line}", quiet)


def provide_command(name: str, package: str, purpose: str) -> None:
    """A program on PATH, from its Debian package where it is missing."""
    if shutil.which(name) is None:
        apt_install([package], purpose)


def _provide_venv_module() -> None:
    if _importable("venv") and _importable("ensurepip"):
        return
    names = ["python3-venv"]
    if Path(sys.executable).resolve() != Path("/usr/bin/python3").resolve():
        names = [f"python{sys.version_info.major}.{sys.version_info.minor}-venv"]
    apt_install(names, "a private Python environment")


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2"]


def _run(command: list[str], failure: str, environment: dict[str, str] | None = None) -> None:
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode:
        lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        raise UsageError(failure, lines[-8:])


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _same(stamp: Path, wanted: str) -> bool:
    """Whether the stamp names these requirements; the interpreter that older stamps begin with doesn't matter."""
    try:
        lines = stamp.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return False
    return "\n".join(line for line in lines if not line.startswith("python ")) == wanted


def _runs(python: Path) -> bool:
    """Whether an environment's interpreter starts and sees its packages: the one behind it may be gone or newer."""
    try:
        return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _short(path: Path) -> str:
    return str(path.relative_to(CHECKOUT.root)) if path.is_relative_to(CHECKOUT.root) else str(path)


def _off() -> bool:
    return os.environ.get("TREEVERIFY_NO_BOOTSTRAP", "") not in ("", "0")
