# SPDX-License-Identifier: Apache-2.0
"""What a person must settle before a pin counts: marks that `port` leaves and only people take away."""

from __future__ import annotations

from pathlib import Path

TODO = ".todo"  # beside a patch: its hunks that did not go in
MARK = "# to settle: "  # before a row of pin.toml; in series, the place of a patch that has no hunk yet
REPORT = "PORT.md"
IMPORTS = "## Imports of the overlay"  # heads the report's last part: names the release has not, a line each


def unsettled(folder: Path) -> list[str]:
    """Each thing of a pin's folder that waits, a line each; none in a pin that is ready. `port` counts the same.

    The place of a patch in series counts alone only where the file of its hunks is gone.
    """
    todo = {path.name: _hunks(path) for path in sorted(folder.glob(f"*{TODO}"))}
    found = [line for lines in todo.values() for line in lines]
    for name in ("pin.toml", "series"):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        marks = [(i, line.removeprefix(MARK)) for i, line in enumerate(lines, 1) if line.startswith(MARK)]
        found += [f"{name}:{i}: {what}" for i, what in marks if name != "series" or what.strip() + TODO not in todo]
    if (report := folder / REPORT).is_file():
        lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines.index(IMPORTS) if IMPORTS in lines else len(lines)
        found += [f"{REPORT}:{i}: {line[2:]}" for i, line in enumerate(lines, 1) if i > last and line.startswith("* ")]
    return found


def to_settle(number: int) -> str:
    """ "1 thing to settle", "2 things to settle"."""
    return f"{number} {'thing' if number == 1 else 'things'} to settle"


def _hunks(path: Path) -> list[str]:
    """A line for every hunk of a file of those that did not go in; one for a file in which none is left."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [
        f"{path.name}:{i}: a hunk that did not go in" for i, line in enumerate(lines, 1) if line.startswith("@@ -")
    ]
    return found or [f"{path.name}: no hunk is left in it; delete it"]
