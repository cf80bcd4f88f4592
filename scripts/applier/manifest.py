# SPDX-License-Identifier: Apache-2.0
"""_manifest.json: what was done to a tree, enough to tell edits from patches and to take it all back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from applier import names
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
    """`files` maps touched files to base and applied blob ids, `overlay` our own files to blob ids.

    `version` is the package's version file and its blob id when it was patched; None in manifests of older checkouts.
    """

    pin: str
    patch_set: str
    patches: list[str]
    files: dict[str, dict[str, str]]
    overlay: dict[str, str]
    kernels: Kernels | None = None
    version: dict[str, str] | None = None
    format: int = field(default=FORMAT)

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def load_manifest(tree: Tree) -> Manifest | None:
    """The tree's manifest, None where it has none. DriftError where it is damaged or of another format."""
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
        return _manifest(raw)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DriftError(
            f"{tree.path(MANIFEST)} is damaged ({type(error).__name__}: {error}); "
            f"with git, `git checkout -- .` and deleting {tree.path(MANIFEST).parent} give the release back; "
            "else reinstall it"
        ) from None


def _manifest(raw: dict[str, Any]) -> Manifest:
    """Checked field by field: what is read here decides what is overwritten. Keys we don't know are left out."""
    files = {
        _path(path): {key: _text(blobs[key]) for key in ("base", "applied")} for path, blobs in raw["files"].items()
    }
    kernels, version = raw["kernels"], raw.get("version")
    return Manifest(
        pin=_text(raw["pin"]),
        patch_set=_text(raw["patch_set"]),
        patches=[_text(name) for name in raw["patches"]],
        files=files,
        overlay=_texts(raw["overlay"]),
        kernels=Kernels(
            sources=_text(kernels["sources"]),
            arches=[_text(arch) for arch in kernels["arches"]],
            nvcc=_text(kernels["nvcc"]),
            library=_text(kernels["library"]),
        )
        if kernels
        else None,
        version=_texts(version) if version else None,
    )


def _texts(raw: dict[str, Any]) -> dict[str, str]:
    """Paths with their blob ids."""
    return {_path(path): _text(blob) for path, blob in raw.items()}


def _path(value: Any) -> str:
    if what := names.fault(value):
        raise ValueError(f"{value!r} {what}")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
