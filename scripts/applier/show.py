# SPDX-License-Identifier: Apache-2.0
"""status and list, for people and for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from applier.advice import Advice
from applier.release import Release
from applier.settling import REPORT, to_settle, unsettled
from applier.state import Difference, State
from applier.text import columns, field, paint, wrapped

COLOURS = {
    "clean": "good",
    "applied": "good",
    "built": "good",
    "absent": "dim",
    "partial": "warn",
    "drifted": "warn",
    "stale": "warn",
    "edited": "bad",
    "missing": "bad",
}
SHOWN = 20
"""Files that are listed before the rest is counted."""


def status_text(package: str, state: State, release: Release, ways: Sequence[Advice]) -> str:
    """What a tree is, why, and what to do about it."""
    lines = [package, *wrapped(f"{paint(state.state, COLOURS[state.state])}: {_meaning(state)}", "  ")]
    lines += unfinished(release, "  ")
    lines += ["", "patches", *columns([(kind, name) for name, kind in state.patches.items()], COLOURS)]
    lines += field("overlay", _counted(state.overlay))
    lines += field("kernels", _kernels(state.kernels))
    if state.reasons:
        lines += ["", "why", *[line for reason in state.reasons for line in wrapped(reason, "  ", "    ")]]
    if differing := [*state.edits, *state.foreign, *state.unknown]:
        lines += ["", "files that differ", *_differences(differing)]
    return "\n".join([*lines, *ways_text(ways)])


def unfinished(release: Release, indent: str) -> list[str]:
    """That a pin is not ready, and how much is left; nothing of one that is."""
    open_points = unsettled(release.pin.folder)
    if not open_points:
        return []
    text = f"no finished pin: {to_settle(len(open_points))}, see {REPORT} in its folder"
    return wrapped(f"{paint('unfinished', 'warn')}: {release.pin.name} is {text}", indent)


def _meaning(state: State) -> str:
    """The state in words."""
    if state.state == "clean":
        return f"SGLang {state.pin} as released"
    if state.state == "drifted" and state.manifest is None:
        return f"not SGLang {state.pin}, the nearest release"
    rest = {"applied": "", "edited": ", and edited since", "partial": ", but not whole"}
    return f"patched for {state.pin}{rest.get(state.state, ', but not as this checkout would')}"


def ways_text(ways: Sequence[Advice]) -> list[str]:
    """Commands stay on a line of their own, whole."""
    lines: list[str] = [""] if ways else []
    for way in ways:
        lines += [f"to {way.text}:" if not way.text.startswith("or ") else f"{way.text}:", f"  {way.command}"]
    return lines


def list_text(releases: Sequence[Release]) -> str:
    """Pins and their patches."""
    lines: list[str] = []
    for release in releases:
        pin = release.pin
        lines += [""] * bool(lines)
        lines.append(f"{paint(pin.name, 'bold')}{' (default)' if pin.default else ''}")
        lines += wrapped(f"sglang {pin.pypi}, Python {pin.requires_python}, commit {pin.commit or 'unknown'}", "  ")
        lines += unfinished(release, "  ")
        for patch in release.patches.patches:
            lines += ["", f"  {paint(patch.name, 'bold')}", *wrapped(patch.title, "    ")]
            lines += field("files", ", ".join(file.path for file in patch.files), "    ")
            lines += field("upstream", patch.header["Upstream"], "    ")
            lines += field("until", _flat(patch.header["Remove-When"]), "    ")
    return "\n".join(lines)


def list_json(releases: Sequence[Release]) -> list[dict[str, Any]]:
    """The same, with the fields scripts may rely on."""
    return [
        {
            "name": release.pin.name,
            "tag": release.pin.tag,
            "commit": release.pin.commit,
            "pypi": release.pin.pypi,
            "requires_python": release.pin.requires_python,
            "default": release.pin.default,
            "to_settle": unsettled(release.pin.folder),
            "patches": [
                {
                    "name": patch.name,
                    "title": patch.title,
                    "files": [file.path for file in patch.files],
                    **{
                        key.lower().replace("-", "_"): _flat(patch.header[key])
                        for key in ("Needs", "Upstream", "Remove-When", "Test")
                    },
                }
                for patch in release.patches.patches
            ],
        }
        for release in releases
    ]


def _counted(states: dict[str, str]) -> str:
    """ "44 files applied" where all are alike, else how many of each."""
    counts = Counter(states.values())
    words = [f"{number} {'file' if number == 1 else 'files'} {kind}" for kind, number in counts.items()]
    return ", ".join(words) or "none"


def _kernels(kernels: dict[str, str]) -> str:
    return ", ".join(f"sm_{arch} {paint(kind, COLOURS[kind])}" for arch, kind in kernels.items()) or "none"


def _differences(differing: Sequence[Difference]) -> list[str]:
    lines = []
    for item in differing[:SHOWN]:
        path, _, blobs = str(item).rpartition(": ")
        lines += [f"  {path}", f"    {blobs}"]
    if len(differing) > SHOWN:
        lines.append(f"  and {len(differing) - SHOWN} more; --json lists them all")
    return lines


def _flat(text: str) -> str:
    return " ".join(text.split())
