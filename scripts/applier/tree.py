# SPDX-License-Identifier: Apache-2.0
"""Finding the SGLang package that --sglang means."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from applier.blob import read
from applier.errors import DriftError, UsageError


@dataclass(frozen=True)
class Tree:
    """A `sglang` package folder, and the git repository it is part of, if any."""

    package: Path
    git_root: Path | None

    def path(self, rel: str) -> Path:
        """Absolute path of `rel`. DriftError where it leaves the package or goes through a link, even one inside it."""
        path = self.package / rel
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a null byte, a name too long
            raise DriftError(f"{rel!r} is no path below {self.package} ({error}); nothing was changed") from None
        if not real.is_relative_to(self.package):
            raise DriftError(f"{rel} leads out of {self.package} (to {real}); nothing is written outside the package")
        if real != path:
            raise DriftError(
                f"{rel} is not itself, it leads to {real}; nothing was changed. Links are not followed: "
                f"put files where the links of {self.package} are, or give a tree without them"
            )
        return path

    def read(self, rel: str) -> bytes | None:
        """Bytes of a file of the package, None where it is missing."""
        return read(self.path(rel))

    @property
    def import_root(self) -> Path:
        """What goes on PYTHONPATH."""
        return self.package.parent


def command_line(tree: Tree, command: str) -> str:
    """A command of apply.py on this tree, ready to paste."""
    return f"python3 apply.py {command} --sglang {shlex.quote(str(tree.package))}"


def locate(folder: Path, option: str = "--sglang") -> Tree:
    """The tree meant by a repository root, its python/, site-packages or the package itself; `option` named it."""
    try:
        folder = folder.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # ~nosuch, a link to itself, a null byte
        raise UsageError(f"{option} {folder}: {error}") from None
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder")
    for place in (folder, *_editable_sources(folder)):
        for candidate in (place, place / "sglang", place / "python" / "sglang"):
            if (candidate / "srt").is_dir() and (candidate / "__init__.py").is_file():
                return _tree(candidate.resolve())
    raise UsageError(
        f"{option} {folder}: no sglang package there; "
        "give a repository root, its python/ folder, site-packages, or the package folder itself"
    )


def _tree(package: Path) -> Tree:
    for root in (package.parent, package.parent.parent):
        if (root / ".git").exists():
            return Tree(package, root)
    return Tree(package, None)


def _editable_sources(site_packages: Path) -> Iterator[Path]:
    """Checkouts behind editable installs, told by their direct_url.json; one that can't be read tells nothing."""
    for info in sorted(site_packages.glob("sglang-*.dist-info/direct_url.json")):
        try:
            record = json.loads(info.read_text(encoding="utf-8"))
            if record["dir_info"]["editable"] and record["url"].startswith("file:"):
                yield Path(unquote(urlsplit(record["url"]).path)).resolve()
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            continue
