# SPDX-License-Identifier: Apache-2.0
"""What a person must settle before a pin counts: marks that `port` leaves and only people take away."""

from __future__ import annotations

from pathlib import Path

TODO = ".todo"  # beside a patch: its hunks that did not go in
MARK = "# to settle: "  # before a row of pin.toml; in series, the place of a patch that has no hunk yet
REPORT = "PORT.md"
IMPORTS = "## Imports of the overlay"  # heads the report's last part: names the release has not, a line each


def unsettled(folder: Path) -> list[str]:
    """Each thing of a pin's folder that waits, a line each; none in a pin that is ready."""
    found = [f"{path.name}: hunks that did not go in" for path in sorted(folder.glob(f"*{TODO}"))]
    for name in ("pin.toml", "series"):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        found += [f"{name}:{i}: {line.removeprefix(MARK)}" for i, line in enumerate(lines, 1) if line.startswith(MARK)]
    if (report := folder / REPORT).is_file():
        lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines.index(IMPORTS) if IMPORTS in lines else len(lines)
        found += [f"{REPORT}:{i}: {line[2:]}" for i, line in enumerate(lines, 1) if i > last and line.startswith("* ")]
    return found
