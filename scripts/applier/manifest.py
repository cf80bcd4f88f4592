# SPDX-License-Identifier: Apache-2.0
"""_manifest.json: what was done to a tree, enough to tell edits from patches and to take it all back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from applier.errors import DriftError
from applier.layout import MANIFEST
from applier.tree import Tree

FORMAT = 1


@dataclass(frozen=True)
class Kernels:
    """The library in the tree: digest of its sources and flags, what it was built for, its blob id."""

    sources: str
    arches: list[str]
    nvcc: str
    library: str


@dataclass(frozen=True)
class Manifest:
    """`files` maps touched files to base and applied blob ids, `overlay` our own files to blob ids."""

    pin: str
    patch_set: str
    patches: list[str]
    files: dict[str, dict[str, str]]
    overlay: dict[str, str]
    kernels: Kernels | None = None
    format: int = field(default=FORMAT)

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def load_manifest(tree: Tree) -> Manifest | None:
    """The tree's manifest, None where it has none."""
    data = tree.read(MANIFEST)
    if data is None:
        return None
    try:
        raw: dict[str, Any] = json.loads(data)
        if raw["format"] != FORMAT:
            raise DriftError(
                f"{tree.path(MANIFEST)} has format {raw['format']}, this checkout writes {FORMAT}: "
                "revert with the treeverify checkout that applied it"
            )
        kernels = raw.pop("kernels")
        return Manifest(**raw, kernels=Kernels(**kernels) if kernels else None)
    except (ValueError, KeyError, TypeError) as error:
        raise DriftError(
            f"{tree.path(MANIFEST)} is damaged ({error}); with git, `git checkout -- .` and deleting "
            f"{tree.path(MANIFEST).parent} give the release back; else reinstall it"
        ) from None
