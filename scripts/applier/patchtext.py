# SPDX-License-Identifier: Apache-2.0
"""A patch file as text: its header and a section a file, so that one can be replaced and the rest stays as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from applier.hunks import split_lines
from applier.patchset import CHECKOUT_PREFIX

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
TOUCHES = re.compile(r"^Touches:.*\n(?:[ \t].*\n)*", re.MULTILINE)
PIN = re.compile(r"^Pin:.*$", re.MULTILINE)


@dataclass
class PatchText:
    """`sections` maps files of the package to their part of the diff, in the file's order."""

    name: str
    header: str
    sections: dict[str, str] = field(default_factory=dict)
    prefix: str = CHECKOUT_PREFIX

    def put(self, path: str, section: str) -> None:
        """Replaces, adds (in the order of names) or, where empty, removes the part for a file."""
        if not section:
            self.sections.pop(path, None)
        elif path in self.sections:
            self.sections[path] = section
        else:
            before = [name for name in self.sections if name < path]
            after = {name: text for name, text in self.sections.items() if name not in before}
            self.sections = {**{name: self.sections[name] for name in before}, path: section, **after}

    def render(self) -> str:
        """The file's text; Touches follows the sections where they name other files than it does."""
        header = self.header
        if (match := TOUCHES.search(header)) is None or set(_names(match[0])) != set(self.sections):
            line = f"Touches: {', '.join(self.sections)}\n"
            header = TOUCHES.sub(lambda _: line, header, count=1) if match else line + header
        return header + "".join(self.sections.values())

    def pinned(self, pin: str) -> PatchText:
        """The same header for another pin, without sections."""
        return PatchText(self.name, PIN.sub(lambda _: f"Pin: {pin}", self.header, count=1), {}, self.prefix)


def parse(name: str, text: str) -> PatchText:
    """Cuts a patch file up; it is one that `patchset` reads, or a header alone."""
    parts: list[list[str]] = [[]]
    paths: list[str] = []
    prefix = CHECKOUT_PREFIX
    old = new = 0
    lines = text.split("\n")
    for i, line in enumerate(lines):
        end = "\n" if i < len(lines) - 1 else ""
        if old > 0 or new > 0:
            old -= line[:1] in (" ", "-", "")
            new -= line[:1] in (" ", "+", "")
        elif match := HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in match.groups())
        elif line.startswith("diff --git ") or (line.startswith("--- ") and _headless(parts[-1])):
            parts.append([])
        elif line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
            prefix = CHECKOUT_PREFIX if path.startswith(CHECKOUT_PREFIX) else ""
            paths.append(path.removeprefix(CHECKOUT_PREFIX))
        parts[-1].append(line + end)
    sections = dict(zip(paths, ("".join(part) for part in parts[1:]), strict=True))
    return PatchText(name, "".join(parts[0]), sections, prefix)


def hunks_of(section: str) -> tuple[str, list[str]]:
    """A section's head and its hunks."""
    parts: list[list[str]] = [[]]
    old = new = 0
    for line in split_lines(section):
        if old > 0 or new > 0:
            old -= line[:1] in (" ", "-", "\n")
            new -= line[:1] in (" ", "+", "\n")
        elif match := HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in match.groups())
            parts.append([])
        parts[-1].append(line)
    head, *hunks = ("".join(part) for part in parts)
    return head, hunks


def _headless(part: list[str]) -> bool:
    """Whether a `---` line begins a section: one that follows `diff --git` belongs to the section that has begun."""
    return not (part and part[0].startswith("diff --git ") and not any(line.startswith("--- ") for line in part))


def _names(touches: str) -> list[str]:
    return touches.partition(":")[2].replace(",", " ").split()
