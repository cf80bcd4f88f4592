# SPDX-License-Identifier: Apache-2.0
"""What holds for every pin's patched tree: it was told by its own files, and the capture lint is content."""

from __future__ import annotations

import json
from pathlib import Path

from applier.layout import CHECKOUT
from applier.overlayimports import missing_imports
from applier.patchset import load_patches
from applier.pin import Pin
from applier.release import load_release
from applier.tree import locate
from capture.config import load_config
from capture.lint import lint


def test_a_tree_gets_the_patches_of_its_release(each_pin: Pin, patched_package: Path) -> None:
    manifest = json.loads((patched_package / "sglang/srt/treeverify/_manifest.json").read_text())
    assert manifest["pin"] == each_pin.name
    assert set(manifest["files"]) <= set(each_pin.blobs)


def test_all_that_the_overlay_imports_of_the_release_is_there(each_pin: Pin, patched_package: Path) -> None:
    assert missing_imports(locate(patched_package), load_release(CHECKOUT, each_pin).overlay) == []


def test_nothing_unexplained_waits_on_the_verify_path(each_pin: Pin, patched_package: Path) -> None:
    report = lint(patched_package / "sglang", load_config(each_pin.folder), load_patches(each_pin).touched)
    assert report.patched and len(report.followed) > 50
    assert [f"{one.file}:{one.line} {one.rule} {one.source}" for one in report.findings] == []
    assert [entry.source for entry in report.stale] == []
