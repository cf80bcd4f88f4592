# SPDX-License-Identifier: Apache-2.0
"""The parsers under random damage: a few thousand inputs of `fuzz_parsers.py`, and of diffs of random texts."""

from __future__ import annotations

import difflib
from pathlib import Path

from applier.blob import blob_id
from applier.patchset import PatchSet, apply_patches, parse_patch, take_out
from applier.pin import Pin
from checkout import HEADER
from fuzz_parsers import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

NO_END = "\\ No newline at end of file\n"


def test_damage_is_refused_or_sound(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 2000)
    assert sum(outcomes.values()) > 2000
    for what in ("patch", "pin", "series", "manifest", "journal"):
        assert outcomes[f"{what} refused"], f"no damage of a {what} was found"
    assert outcomes["patch read, fits"] and outcomes["pin read"]


LINES = ["a", "b", "", " c", "-d", "+e", "@@ -1 +1 @@", "\x0c", "\r", "\x85", "--- f", "\\ g"]
lines = st.lists(st.sampled_from(LINES))


@settings(deadline=None, max_examples=300, database=None)
@given(lines, lines, st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_diff_does_what_it_says(old: list[str], new: list[str], old_end: bool, new_end: bool, context: int) -> None:
    """Any two texts, with or without an end of the last line: their diff makes one of the other, both ways."""
    texts = ["\n".join(side) + "\n" * (end and bool(side)) for side, end in ((old, old_end), (new, new_end))]
    before, after = (text.encode() for text in texts)
    if before == after or not before or not after:
        return
    sides = [text.split("\n") for text in texts]
    sides = [[line + "\n" for line in side[:-1]] + [x for x in side[-1:] if x] for side in sides]
    diff = [
        line if line.endswith("\n") else f"{line}\n{NO_END}"
        for line in difflib.unified_diff(*sides, "a/srt/f.py", "b/srt/f.py", n=context)
    ]
    data = (HEADER.format(title="Any", touches="srt/f.py") + "".join(diff)).encode()
    pin = Pin("v1", "v1", None, "1.0", ">=3.10", True, {"srt/f.py": blob_id(before)}, (), Path())
    patches = PatchSet((parse_patch("0001-any.patch", data, pin),), "")
    assert apply_patches(patches, {"srt/f.py": before}.get) == {"srt/f.py": after}
    assert take_out(patches, "srt/f.py", after) == before
