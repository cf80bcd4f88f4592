# SPDX-License-Identifier: Apache-2.0
"""Where things are: this checkout, and what lies inside a patched SGLang package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Inside the sglang package.
HOME = "srt/treeverify"
MANIFEST = f"{HOME}/_manifest.json"
JOURNAL = f"{HOME}/_journal"
ORIGINALS = f"{HOME}/_originals"
LIBRARY = f"{HOME}/_kernels/libtreeverify.so"


@dataclass(frozen=True)
class Layout:
    """The folders of a treeverify checkout."""

    root: Path

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def kernels(self) -> Path:
        return self.root / "kernels"

    @property
    def build(self) -> Path:
        return self.root / "build"


CHECKOUT = Layout(Path(__file__).resolve().parents[2])


def cache_dir() -> Path:
    """Downloads that outlive a checkout: $TREEVERIFY_CACHE, else ~/.cache/treeverify."""
    return Path(os.environ.get("TREEVERIFY_CACHE") or Path.home() / ".cache" / "treeverify")
