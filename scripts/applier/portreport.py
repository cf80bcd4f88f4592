# SPDX-License-Identifier: Apache-2.0
"""PORT.md: what became of every patch in a new pin, and what a person must settle, with the lines side by side."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

from applier.fit import CLEAN, CONFLICT, MERGES, UPSTREAM, FileFit, HunkFit, PatchFit
from applier.hunks import Hunk
from applier.port import Port
from applier.rederive import HOLDS, MOVED
from applier.settling import IMPORTS, MARK, TODO
from applier.sidebyside import side_by_side

SAYS = {CLEAN: "as it was", MERGES: "merged", UPSTREAM: "the release has it already"}


def summary(port: Port) -> list[str]:
    """A line a patch, and one for each other thing to settle; for a terminal."""
    found = [f"{patch.name}: {_patch(port, patch)}" for patch in port.fit.patches]
    found += [f"{moved}{'; followed' if moved.followed else ''}" for moved in port.moved.values()]
    held = sum(item.state == HOLDS for item in port.contract)
    elsewhere = sum(item.state == MOVED for item in port.contract)
    found.append(f"dtype contract: {held} rows hold, {elsewhere} in another file, {len(port.broken)} to settle")
    found.append(f"imports of the overlay that are gone: {len(port.imports) or 'none'}")
    return found


def report(port: Port) -> str:
    """The Markdown text; the same for the same trees."""
    return "\n".join(_lines(port)) + "\n"


def _lines(port: Port) -> Iterator[str]:
    old = port.release.pin.name
    yield f"# {port.name}, started from {old}: {port.open or 'nothing'} to settle"
    yield ""
    yield from (f"* {line}" for line in summary(port))
    yield ""
    yield "Delete this file with the last thing settled. While any is left `apply` refuses the pin, but for --force."
    yield ""
    yield f"1. Rows of `pin.toml` below a `{MARK.strip()}` line: change the row, or the kernels; then delete the line."
    yield f"2. `apply.py apply --no-build --force --pin {port.name} --sglang DIR` puts in what fits."
    yield f"3. Make the hunks of each `{TODO}` file by hand in DIR, `apply.py refresh --sglang DIR --patch NAME` (with"
    yield f"   `--add PATH` for a file that no patch touches yet), then delete the `{TODO}` file."
    yield "4. Imports of the overlay, listed below: write the file for this pin in its `overlay/`, delete the line."
    yield f"5. Bring the tests of {old} over; the `Test:` lines of the headers still name those."
    for patch in port.fit.patches:
        files = [file for file in patch.files if file.state not in (CLEAN, MERGES, UPSTREAM)]
        if files:
            yield from ("", f"## {patch.name}")
        for file in files:
            yield from _file(port, file)
    if port.broken:
        yield from ("", "## The dtype contract", "")
        yield from (f"* {note}" for note in dict.fromkeys(item.note for item in port.broken))
    if port.imports:
        yield from ("", IMPORTS, "")
        yield from (f"* {line}" for line in port.imports)


def _patch(port: Port, patch: PatchFit) -> str:
    if patch.state in SAYS:
        return SAYS[patch.state]
    total = sum(len(file.hunks) for file in patch.files)
    left = sum(name == patch.name for name, _, _ in port.waiting)
    return f"{left} of {total} hunks to settle"


def _file(port: Port, file: FileFit) -> Iterator[str]:
    old = port.release.pin.name
    moved = port.moved.get(file.path)
    yield ""
    yield f"### {port.path(file.path)}"
    if file.why:
        yield from ("", f"{moved or file.why}.")
        return
    for hunk in file.hunks:
        if hunk.state == CONFLICT:
            yield from ("", f"Hunk {hunk.number}, line {hunk.hunk.start} in {old}: {_where(hunk)}", "")
            if hunk.found is not None:
                yield "```"
                heads = (f"expected ({old})", f"found (line {hunk.line})")
                yield from side_by_side(hunk.hunk.old, hunk.found, heads)
                yield from ("```", "")
            yield from ("```diff", *_diff(hunk.hunk), "```")


def _diff(hunk: Hunk) -> Iterator[str]:
    """What the patch does, as its file has it."""
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, hunk.old, hunk.new, autojunk=False).get_opcodes():
        yield from (f"{' ' if kind == 'equal' else '-'}{line}".rstrip("\n") for line in hunk.old[a0:a1])
        yield from (f"+{line}".rstrip("\n") for line in hunk.new[b0:b1] if kind != "equal")


def _where(hunk: HunkFit) -> str:
    return f"near line {hunk.line} ({hunk.why})." if hunk.found is not None else "nothing in the file is like it."
