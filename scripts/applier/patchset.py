# SPDX-License-Identifier: Apache-2.0
"""The patches of a pin: parsed, checked against their headers, applied in memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from applier import names
from applier.errors import DriftError, UsageError
from applier.hunks import FilePatch, Hunk, HunkError, Mismatch, apply_hunks, reverse, split_lines
from applier.pin import Pin

REQUIRED = ("Description", "Pin", "Touches", "Needs", "Upstream", "Remove-When", "Test")
CHECKOUT_PREFIX = "python/sglang/"
GIT_LINES = ("diff --git ", "index ")


@dataclass(frozen=True)
class Patch:
    """One file of patches/<pin>/: a DEP-3 style header, then hunks."""

    name: str
    header: dict[str, str]
    files: tuple[FilePatch, ...]

    @property
    def title(self) -> str:
        """First sentence of the description."""
        return self.header["Description"].split("\n")[0]


@dataclass(frozen=True)
class PatchSet:
    """All patches of a pin in the order of `series`."""

    patches: tuple[Patch, ...]
    digest: str

    @property
    def touched(self) -> list[str]:
        """Files of the package that some patch changes."""
        return sorted({file.path for patch in self.patches for file in patch.files})


def load_patches(pin: Pin) -> PatchSet:
    """Reads series and patches; UsageError names the patch and the rule it breaks."""
    listed = _series(pin.folder)
    digest = hashlib.sha256()
    patches = []
    for name in listed:
        data = (pin.folder / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        patches.append(parse_patch(name, data, pin))
    return PatchSet(tuple(patches), digest.hexdigest())


def apply_patches(patches: PatchSet, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """New content of every touched file, nothing written. DriftError lists every hunk that doesn't fit."""
    content: dict[str, list[str]] = {}
    trouble: list[str] = []
    for patch in patches.patches:
        for file in patch.files:
            if file.path not in content:
                data = read(file.path)
                if data is None:
                    trouble.append(f"{patch.name}: {file.path} is missing from the tree")
                    continue
                content[file.path] = split_lines(decode(data))
            try:
                content[file.path] = apply_hunks(file, content[file.path])
            except HunkError as error:
                trouble += [line for m in error.mismatches for line in _report(patch.name, file.path, m)]
    if trouble:
        raise DriftError("the patches do not fit this tree; nothing was changed", trouble)
    return {path: encode("".join(lines)) for path, lines in content.items()}


def put_in(patches: PatchSet, path: str, data: bytes) -> bytes:
    """One file with all that the patches do to it. HunkError where one does not fit."""
    lines = split_lines(decode(data))
    for file in (file for patch in patches.patches for file in patch.files if file.path == path):
        lines = apply_hunks(file, lines)
    return encode("".join(lines))


def take_out(patches: PatchSet, path: str, data: bytes) -> bytes | None:
    """One file without what the patches do to it; None where they change nothing there or any hunk isn't in place."""
    mine = [file for patch in reversed(patches.patches) for file in patch.files if file.path == path]
    lines = split_lines(decode(data))
    try:
        for file in mine:
            lines = apply_hunks(reverse(file), lines)
    except HunkError:
        return None
    return encode("".join(lines)) if mine else None


def decode(data: bytes) -> str:
    """UTF-8 that gives back the same bytes whatever they were."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _report(patch: str, path: str, m: Mismatch) -> list[str]:
    def quoted(text: str | None) -> str:
        return "(end of file)" if text is None else repr(text)

    lines = [
        f"{patch}: {path}: hunk {m.hunk} at line {m.line}",
        f"  expected {quoted(m.expected)}",
        f"  found    {quoted(m.found)}",
    ]
    if m.upstreamed_at is not None:
        lines.append(
            f"  the tree already has this hunk's result at line {m.upstreamed_at}: upstream may have merged it"
        )
    elif m.moved_to is not None:
        lines.append(f"  the expected lines stand at line {m.moved_to}: the patch needs refreshing for this tree")
    return lines


def _series(folder: Path) -> list[str]:
    path = folder / "series"
    if not path.is_file():
        raise UsageError(f"{folder.name}: no series file in {folder}")
    listed = [line.split("#")[0].strip() for line in _utf8(str(path), path.read_bytes()).splitlines()]
    listed = [name for name in listed if name]
    present = {entry.name for entry in folder.glob("*.patch")}
    for name in listed:
        if listed.count(name) > 1:
            raise UsageError(f"{path}: {name} is listed twice")
        if name not in present:
            raise UsageError(f"{path}: {name!r} does not exist")
    stray = sorted(present - set(listed))
    if stray:
        raise UsageError(f"{path}: not listed: {', '.join(stray)}")
    return listed


def _utf8(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}") from None


def parse_patch(name: str, data: bytes, pin: Pin) -> Patch:
    """One patch file of a pin. UsageError where it is not what docs/patch-sets.md says."""
    from unidiff.errors import UnidiffParseError
    from unidiff.patch import PatchSet as UnifiedDiff

    text = _utf8(name, data)
    if not text.endswith("\n"):
        raise UsageError(f"{name}: the last line has no end: cut off?")
    start = re.search(r"^(diff --git |--- )", text, re.MULTILINE)
    if start is None:
        raise UsageError(f"{name}: no hunks")
    header = _header(name, text[: start.start()], pin)
    try:
        diff = UnifiedDiff(text[start.start() :])
    except (UnidiffParseError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise UsageError(f"{name}: not a unified diff: {str(error).strip()}") from None
    _require_every_line_read(name, text[start.start() :], diff)
    files: list[FilePatch] = []
    for item in diff:
        if "/dev/null" in (item.source_file, item.target_file) or item.is_rename or item.is_binary_file:
            raise UsageError(f"{name}: {item.path}: patches change files; new ones belong into overlay/")
        path = _package_path(name, item.path)
        if path not in pin.blobs:
            raise UsageError(f"{name} touches {path}, which has no blob in {pin.name}/pin.toml [blobs]")
        if any(file.path == path for file in files):
            raise UsageError(f"{name}: {path} comes twice; put its hunks together")
        file = FilePatch(path, tuple(_hunk(hunk) for hunk in item))
        _require_sound(name, file)
        files.append(file)
    named = set(header["Touches"].replace(",", " ").split())
    touched = {file.path for file in files}
    if named != touched:
        raise UsageError(f"{name}: Touches names {sorted(named)}, the hunks change {sorted(touched)}")
    return Patch(name, header, tuple(files))


def _header(name: str, text: str, pin: Pin) -> dict[str, str]:
    header: dict[str, str] = {}
    field = None
    for line in text.splitlines():
        match = re.match(r"([A-Z][A-Za-z-]+):\s*(.*)", line)
        if match:
            field = match[1]
            header[field] = match[2]
        elif field and line.startswith((" ", "\t")):
            header[field] = (header[field] + "\n" + line.strip()).strip()
        elif line.strip() and line.strip() != "---":
            raise UsageError(f"{name}: not a header line: {line!r}")
    missing = [field for field in REQUIRED if not header.get(field)]
    if missing:
        raise UsageError(f"{name}: header lacks {', '.join(missing)}")
    if header["Pin"] != pin.name:
        raise UsageError(f"{name}: Pin is {header['Pin']}, the folder is {pin.name}")
    return header


def _package_path(name: str, path: str) -> str:
    path = path.removeprefix(CHECKOUT_PREFIX)
    if what := names.fault(path):
        raise UsageError(f"{name}: {path!r} {what}")
    return path


def parse_hunks(data: bytes) -> list[Hunk]:
    """The hunks of a diff of one file, as a diff tool wrote it."""
    from unidiff.patch import PatchSet as UnifiedDiff

    return [_hunk(hunk) for item in UnifiedDiff(decode(data)) for hunk in item]


def _require_every_line_read(name: str, text: str, diff: Any) -> None:
    """unidiff takes what it does not know for remarks, so a mistyped hunk would be left out without a word."""
    for item in diff:
        for line in item.patch_info or ():
            if not line.startswith(GIT_LINES):
                raise UsageError(f"{name}: {item.path}: this line is no part of a hunk: {line!r}")
        if not item and not item.is_binary_file:
            raise UsageError(f"{name}: {item.path}: no hunks; modes and names are not patched")
    read = sum(2 + len(item.patch_info or ()) + sum(1 + len(hunk) for hunk in item) for item in diff)
    lines = text.removesuffix("\n").split("\n")
    if read != len(lines):
        raise UsageError(f"{name}: {abs(len(lines) - read)} lines after the first --- are no part of a hunk")


def _require_sound(name: str, file: FilePatch) -> None:
    """Old lines start at a line; only the file's last line is without an end."""
    for hunk in file.hunks:
        if hunk.old and hunk.start < 1:
            raise UsageError(f"{name}: {file.path}: a hunk with old lines starts at line {hunk.start}")
        ends_open = [not line.endswith("\n") for side in (hunk.old, hunk.new) for line in side[-1:]]
        inside = any(not line.endswith("\n") for side in (hunk.old, hunk.new) for line in side[:-1])
        if inside or "" in hunk.old + hunk.new or (any(ends_open) and hunk is not file.hunks[-1]):
            raise UsageError(f"{name}: {file.path}: line {hunk.start}: a line without its end is not the file's last")


def _hunk(hunk: Any) -> Hunk:
    old: list[str] = []
    new: list[str] = []
    last: list[list[str]] = []
    for line in hunk:
        if line.line_type == "\\":  # "No newline at end of file" belongs to the line before it
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        if not line.line_type:  # an empty line between two hunks or at the end
            continue
        last = [old] * (line.line_type in " -") + [new] * (line.line_type in " +")
        for side in last:
            side.append(line.value)
    return Hunk(hunk.source_start, tuple(old), tuple(new), hunk.section_header)
