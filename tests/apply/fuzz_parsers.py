# SPDX-License-Identifier: Apache-2.0
"""Random damage to patches, pins, series, manifests and journals: PYTHONPATH=scripts python fuzz_parsers.py.

Whatever is read, the answer is a refusal of the tool's own or something sound, and nothing outside the tree is named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from applier import names
from applier.errors import ApplierError, DriftError, UsageError
from applier.hunks import split_lines
from applier.journal import heal
from applier.layout import JOURNAL, MANIFEST
from applier.manifest import load_manifest
from applier.patchset import PatchSet, apply_patches, load_patches, parse_patch, take_out
from applier.pin import PATHS, Pin, load_pin
from applier.plan import originals, revert_changes
from applier.state import inspect_recorded
from applier.tree import Tree, locate
from checkout import ALPHA, BETA, FIRST, HEADER, SECOND, make_checkout, tree_hash
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

FILES = {"srt/alpha.py": ALPHA.encode(), "srt/beta.py": BETA.encode()}
PATCHES = [
    HEADER.format(title="The hook", touches="srt/alpha.py, srt/beta.py") + FIRST,
    HEADER.format(title="More", touches="srt/beta.py") + SECOND,
    HEADER.format(title="As git writes it", touches="srt/beta.py")
    + "diff --git a/srt/beta.py b/srt/beta.py\nindex 0123456..89abcde 100644\n"
    + SECOND.replace("python/sglang/", "")
    + "@@ -40 +41,2 @@ line 39\n-line 40\n+line forty\n+the end\n\\ No newline at end of file\n",
]
WORDS = [
    *("--- a/../x", "+++ b/../x", "--- /dev/null", "+++ /etc/passwd", "--- a/srt/alpha.py", "+++ b/srt/beta.py"),
    *("@@ -1 +1 @@", "@@ -0,0 +1 @@", "@@ -5,3 +5,3", f"@@ -{'9' * 5000},1 +1 @@", "@@ -٣ +٣ @@", "\\ No newline"),
    *("diff --git a/srt/beta.py b/../../y", "rename to x", "old mode 100644", "new file mode 120000", "-- ", "2.39.2"),
    *("Binary files a/srt/beta.py and b/srt/beta.py differ", "GIT binary patch", "Touches: ../x", "Pin: v2", "Needs:"),
    *(" line 4", "-line 5", "+line 5", " ", "", "\t", "\0", "\r", "\x0c", "\x85", "\u2028", "\ud7ff", "..", "/", "\\"),
    *("[pin]", "[blobs]", "[[dtype]]", "[dtype]", "pin = 1", "default = 1", 'name = ["v1"]', "blobs = []", "1979-05-2"),
    *('"../x" = "eff3a561"', f'"srt/ALPHA.py" = "{"0" * 40}"', f'"srt" = "{"0" * 40}"', '"', "'''", "= {", "#"),
    *('path = "eager"', 'file = "/etc/passwd"', "when = 1", "0001-hook.patch", "../0001-hook.patch", "*", "a" * 300),
]
VALUES = [None, True, 0, -1, 1e99, "", "..", "../x", "/etc/passwd", "srt", "a\0b", "srt/alpha.py", "x" * 300, [], {}]

KINDS = "delete double swap word insert byte cut".split()

places = st.floats(0, 1, exclude_max=True)
edits = st.lists(
    st.tuples(st.sampled_from(KINDS), places, places, st.sampled_from(WORDS)),
    min_size=1,
    max_size=4,
)
swaps = st.lists(st.tuples(places, st.one_of(st.sampled_from(VALUES), st.text(max_size=9))), min_size=1, max_size=3)


def damaged(text: str, changes: list[tuple[str, float, float, str]]) -> bytes:
    """The text with lines lost, doubled, moved and replaced, with other bytes, or cut off."""
    for kind, here, there, word in changes:
        lines = text.split("\n")
        i, j = int(here * len(lines)), int(there * len(lines))
        at = int(here * len(text))
        if kind == "delete":
            del lines[i]
        elif kind == "double":
            lines.insert(j, lines[i])
        elif kind == "swap":
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == "word":
            lines[i] = word
        if kind in ("delete", "double", "swap", "word"):
            text = "\n".join(lines)
        elif kind == "insert":
            text = text[:at] + word + text[at:]
        elif kind == "byte":
            text = text[:at] + chr(int(there * 256)) + text[at + 1 :]
        else:
            text = text[:at]
    data = text.encode("utf-8")
    last = changes[-1]
    return data.replace(b"e", bytes([int(last[2] * 256)]), 1) if last[0] == "byte" else data


def exchanged(value: Any, changes: list[tuple[float, Any]]) -> Any:
    """A JSON value with some of its parts, keys among them, replaced."""
    for place, new in changes:
        value = json.loads(json.dumps(value))
        spots: list[tuple[Any, Any]] = []

        def walk(node: Any, spots: list[tuple[Any, Any]] = spots) -> None:
            for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                spots.append((node, key))
                walk(node[key])

        walk(value)
        if not spots:
            return new
        node, key = spots[int(place * len(spots))]
        if isinstance(node, dict) and isinstance(new, str):
            node[new] = node.pop(key)
        else:
            node[key] = new
    return value


class Fuzz:
    """A small checkout and a patched tree, and one check for each thing that is parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outcomes = folder, Counter[str]()
        self.checkout = make_checkout(folder)
        self.pin = load_pin(self.checkout.pin)
        self.pin_text = (self.checkout.pin / "pin.toml").read_text()
        run = self.checkout.run("apply", "--no-build")
        assert run.returncode == 0, run.stderr
        self.tree = locate(self.checkout.package)
        self.manifest = json.loads((self.tree.package / MANIFEST).read_text())
        self.before = tree_hash(folder)

    def patch(self, which: str, changes: list[tuple[str, float, float, str]]) -> None:
        data = damaged(which, changes)
        try:
            patch = parse_patch("0001-x.patch", data, self.pin)
        except UsageError:
            self.outcomes["patch refused"] += 1
            return
        for file in patch.files:
            assert file.path in FILES and names.fault(file.path) is None and file.hunks
        patches = PatchSet((patch,), "")
        try:
            content = apply_patches(patches, FILES.get)
        except DriftError:
            self.outcomes["patch read, does not fit"] += 1
            return
        self.outcomes["patch read, fits"] += 1
        for path, new in content.items():
            assert all(line.endswith("\n") for line in split_lines(new.decode("utf-8", "surrogateescape"))[:-1])
            assert take_out(patches, path, new) == FILES[path], "what goes in comes out again"

    def toml(self, changes: list[tuple[str, float, float, str]]) -> None:
        folder = self.folder / "pins" / "v1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pin.toml").write_bytes(damaged(self.pin_text, changes))
        try:
            pin = load_pin(folder)
        except UsageError:
            self.outcomes["pin refused"] += 1
            return
        self.outcomes["pin read"] += 1
        sound(pin)

    def series(self, changes: list[tuple[str, float, float, str]]) -> None:
        listed = self.checkout.pin / "series"
        text = listed.read_bytes()
        listed.write_bytes(damaged(text.decode(), changes))
        try:
            patches = load_patches(self.pin)
            assert [patch.name for patch in patches.patches] in (
                ["0001-hook.patch", "0002-more.patch"],
                ["0002-more.patch", "0001-hook.patch"],
            )
            self.outcomes["series read"] += 1
        except UsageError:
            self.outcomes["series refused"] += 1
        finally:
            listed.write_bytes(text)

    def record(self, changes: list[tuple[float, Any]]) -> None:
        """The manifest: what revert would change lies in the tree."""
        (self.tree.package / MANIFEST).write_text(json.dumps(exchanged(self.manifest, changes)))
        try:
            manifest = load_manifest(self.tree)
            assert manifest is not None
            inspect_recorded(self.tree, manifest)
            originals(self.tree, manifest)
            for change in revert_changes(self.tree, manifest):
                assert self.tree.path(change.path).resolve().is_relative_to(self.tree.package)
            self.outcomes["manifest read"] += 1
        except ApplierError:
            self.outcomes["manifest refused"] += 1

    def journal(self, changes: list[tuple[float, Any]]) -> None:
        """plan.json in a tree of its own, beside a file that must stay."""
        site = self.folder / "healed"
        shutil.rmtree(site, ignore_errors=True)
        home = site / "sglang" / JOURNAL
        home.mkdir(parents=True)
        (site / "x").write_text("mine")
        (site / "sglang/__init__.py").touch()
        for path, data in FILES.items():
            (site / "sglang" / path).write_bytes(data)
        tree = Tree(site / "sglang", None)
        blobs = self.manifest["files"]
        plan = {"changes": [{"path": p, "old": blobs[p]["applied"], "new": blobs[p]["base"]} for p in FILES]}
        plan["changes"].append({"path": "srt/new.py", "old": None, "new": "0" * 40})
        (home / "0.old").write_bytes(b"torn")
        (home / "plan.json").write_text(json.dumps(exchanged(plan, changes)))
        try:
            self.outcomes[f"journal {heal(tree)}"] += 1
        except ApplierError:
            self.outcomes["journal refused"] += 1
        except OSError as error:  # a folder where a file is to be put, told by the command line as it is
            assert site in Path(error.filename).parents
            self.outcomes["journal refused by the system"] += 1
        assert {path.name for path in site.iterdir()} == {"x", "sglang"} and (site / "x").read_text() == "mine"


def sound(pin: Pin) -> None:
    """What the rest of the tool takes for granted in a pin."""
    texts = [pin.name, pin.tag, pin.pypi, pin.requires_python, *pin.blobs, *pin.blobs.values()]
    texts += [text for row in pin.dtypes for text in (row.backend, row.name, row.dtype, row.file, row.site, row.var)]
    assert all(isinstance(text, str) for text in texts)
    assert isinstance(pin.commit, str | None) and isinstance(pin.default, bool)
    assert not any(names.fault(path) for path in [*pin.blobs, *(row.file for row in pin.dtypes)])
    assert names.clash(pin.blobs) is None and all(row.path in PATHS for row in pin.dtypes)


def fuzz(folder: Path, inputs: int) -> Counter[str]:
    """`inputs` for patches and pins together, a tenth as many for the rest; what became of them."""
    target = Fuzz(folder)
    limits = settings(
        database=None, deadline=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
    )

    def drive(check: Callable[..., None], count: int, *strategies: st.SearchStrategy[Any]) -> None:
        settings(limits, max_examples=max(1, count))(given(st.tuples(*strategies))(lambda drawn: check(*drawn)))()

    drive(target.patch, inputs * 6 // 10, st.sampled_from(PATCHES), edits)
    drive(target.toml, inputs * 4 // 10, edits)
    drive(target.series, inputs // 30, edits)
    drive(target.record, inputs // 30, swaps)
    drive(target.journal, inputs // 30, swaps)
    (target.tree.package / MANIFEST).write_bytes(b"")
    return target.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(Path(folder), options.inputs)
    for outcome, count in outcomes.most_common():
        print(f"{count:8} {outcome}")
    print(f"{sum(outcomes.values())} inputs in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
