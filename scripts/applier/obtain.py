# SPDX-License-Identifier: Apache-2.0
"""Making a tree: the pinned release from its PyPI wheel, laid out as a git repository with python/sglang/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from applier.blob import blob_id
from applier.bootstrap import pip_command, provide_command
from applier.errors import DriftError, UsageError
from applier.gitinfo import commit_tree
from applier.layout import Layout, cache_dir
from applier.lock import locked
from applier.pin import Pin
from applier.requirements import allows
from applier.say import note, progress

# The wheel may carry compiled parts for one Python and machine only; its sources are the same for all of them.
PYTHONS = ("3.11", "3.12", "3.10", "3.13")
PLATFORM = ["--implementation", "cp", "--platform", "manylinux_2_34_x86_64"]


def made_tree(layout: Layout, pin: Pin) -> Path:
    """Where `make_tree` puts it."""
    return layout.build / f"sglang-{pin.tag}"


def make_tree(layout: Layout, pin: Pin) -> Path:
    """build/sglang-<tag>, made where it isn't there yet. UsageError where the wheel can't be had."""
    target = made_tree(layout, pin)
    layout.build.mkdir(parents=True, exist_ok=True)
    with locked(layout.build, timeout=1800, waiting=note):
        if not target.exists():
            unpack_release(pin, fetch_wheel(pin), target)
    return target


def fetch_wheel(pin: Pin) -> Path:
    """The release's wheel in the cache, downloaded once, and again where it is damaged."""
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, timeout=1800, waiting=note):
        while found := _cached(folder, pin):
            if _intact(found):
                return found
            note(f"{found} is damaged and deleted")
            found.unlink()
        note(f"downloading sglang {pin.pypi} from PyPI …")
        failures: list[str] = []
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for choice in wheel_choices(pin):
                command = [*pip_command(), "download", "--quiet", "--no-deps", "--dest", scratch]
                command += ["--only-binary=:all:", *choice]
                run = subprocess.run([*command, f"sglang=={pin.pypi}"], capture_output=True, text=True, check=False)
                if run.returncode == 0:
                    wheel = next(Path(scratch).glob("*.whl"))
                    if not _intact(wheel):
                        raise UsageError(f"{wheel.name} arrived damaged; try again, or give a tree with --sglang")
                    return Path(shutil.move(str(wheel), folder / wheel.name))
                failures = run.stderr.strip().splitlines()[-3:]
    raise UsageError(
        f"sglang {pin.pypi} could not be downloaded; check the network, or give a tree you have with --sglang", failures
    )


def wheel_choices(pin: Pin) -> list[list[str]]:
    """pip's flags for every Python that the release is for, this one first; then the same for another machine.

    Each is named to pip: it would take the interpreter that runs it otherwise, which need not be one of the release's.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pythons = [version for version in dict.fromkeys((here, *PYTHONS)) if allows(pin.requires_python, version)]
    named = [["--python-version", version] for version in pythons]
    return [*named, *([*PLATFORM, *choice] for choice in named)]


def unpack_release(pin: Pin, wheel: Path, target: Path) -> None:
    """Unpacks, compares with the pin, commits, and only then gives it its name."""
    provide_command("git", "git", "making a git tree of the release")
    scratch = Path(tempfile.mkdtemp(prefix=".sglang-", dir=target.parent))
    try:
        os.chmod(scratch, 0o755)
        digest = _unpack(wheel, scratch / "python")
        wrong = [path for path, blob in pin.blobs.items() if _blob(scratch / "python" / "sglang" / path) != blob]
        if wrong:
            raise DriftError(f"{wheel.name} is not {pin.name}: these files differ from pin.toml", wrong)
        note("committing it …")
        commit_tree(str(scratch), f"sglang {pin.pypi} as on PyPI\n\nFiles: {digest}\n")
        os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _unpack(wheel: Path, target: Path) -> str:
    """The wheel's sglang package, with plain modes; gives a digest of its names and checksums."""
    listing = []
    with zipfile.ZipFile(wheel) as archive, progress("unpacking") as step:
        members = [item for item in archive.infolist() if item.filename.startswith("sglang/") and not item.is_dir()]
        for i, item in enumerate(members):
            step(i, len(members), "")
            path = target / item.filename
            if not path.resolve().is_relative_to(target.resolve()):
                raise UsageError(f"{wheel.name} holds {item.filename!r}, which leads out of the tree")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(item))
            listing.append(f"{item.filename} {item.CRC:08x} {item.file_size}")
    return blob_id("\n".join(sorted(listing)).encode())


def cached_wheel(pin: Pin) -> Path | None:
    """The release's wheel where it has been fetched already."""
    found = _cached(cache_dir() / "wheels", pin)
    return found if found and _intact(found) else None


def _cached(folder: Path, pin: Pin) -> Path | None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted(folder.glob(f"sglang-{pin.pypi}-*.whl"), key=lambda path: tag not in path.name)
    return wheels[0] if wheels else None


def _intact(wheel: Path) -> bool:
    """Whether every member can be read and has its checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError):
        return False


def _blob(path: Path) -> str | None:
    return blob_id(path.read_bytes()) if path.is_file() else None
