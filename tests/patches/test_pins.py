# SPDX-License-Identifier: Apache-2.0
"""A tree is told its pin by its own files; nobody names it."""

from __future__ import annotations

import json
from pathlib import Path

from applier.pin import Pin


def test_a_tree_gets_the_patches_of_its_release(each_pin: Pin, patched_package: Path) -> None:
    manifest = json.loads((patched_package / "sglang/srt/treeverify/_manifest.json").read_text())
    assert manifest["pin"] == each_pin.name
    assert set(manifest["files"]) <= set(each_pin.blobs)
