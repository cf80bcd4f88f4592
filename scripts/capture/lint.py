# SPDX-License-Identifier: Apache-2.0
"""A tree linted by its pin's regions and list of allowed findings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from applier.errors import UsageError
from applier.layout import HOME

from capture.config import CONFIG, Allowed, Config, Region
from capture.findings import Finding
from capture.project import Project
from capture.walker import Walker


@dataclass(frozen=True)
class Report:
    """`allowed` pairs findings with their reasons; `stale` are entries of the list that match nothing."""

    patched: bool
    findings: list[Finding]
    allowed: list[tuple[Finding, Allowed]]
    stale: list[Allowed]
    followed: list[str]
    """Functions, as file::function."""
    not_followed: list[str]
    """Functions of the package that are called and were left out."""

    @property
    def ok(self) -> bool:
        return not self.findings and not self.stale


def lint(package: Path, config: Config, patched_files: list[str]) -> Report:
    """Lints the `sglang` package in a folder.

    A tree without the overlay is linted from SGLang's own entries, and nothing is allowed there: what the patches step
    round is what the report shows. UsageError where a configured place is gone from the tree.
    """
    project = Project(package)
    overlay = sorted((package / HOME).rglob("*.py"))
    patched = bool(overlay)
    scope = {*config.follow, *patched_files, *(path.relative_to(package).as_posix() for path in overlay)}
    missing = [path for path in config.follow if project.module(path) is None]
    found: dict[tuple[str, str, int, str], Finding] = {}
    not_followed: set[str] = set()
    followed: set[str] = set()
    for region in config.regions:
        entries = [place for place in region.entries if patched or not place.startswith(f"{HOME}/")]
        walker = Walker(project, _without_overlay(region) if not patched else region, scope)
        missing += [f"{place} ({region.name})" for place in walker.known.missing]
        for place in entries:
            try:
                walker.enter(place)
            except LookupError:
                missing.append(f"{place} ({region.name})")
        for key, finding in walker.findings.items():
            found.setdefault(key, finding)
        not_followed |= walker.not_followed
        followed |= walker.followed
    if missing:
        raise UsageError(f"{CONFIG} names what {package} does not have; has the release changed?", missing)
    ordered = sorted(found.values(), key=lambda one: (one.file, one.line, one.rule))
    if not patched:
        return Report(False, ordered, [], [], sorted(followed), sorted(not_followed))
    kept, allowed, used = [], [], set()
    for finding in ordered:
        entry = next((one for one in config.allowed if _covers(one, finding)), None)
        if entry is None:
            kept.append(finding)
        else:
            allowed.append((finding, entry))
            used.add(entry)
    stale = [entry for entry in config.allowed if entry not in used]
    return Report(True, kept, allowed, stale, sorted(followed), sorted(not_followed))


def _covers(entry: Allowed, finding: Finding) -> bool:
    return (entry.rule, entry.file, entry.function, entry.source) == (
        finding.rule,
        finding.file,
        finding.function,
        finding.source,
    )


def _without_overlay(region: Region) -> Region:
    """For a tree as released: what stands for a class or attribute there is SGLang's own."""
    return replace(region, types=_outside(region.types), concrete=_outside(region.concrete))


def _outside(places: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    kept = {name: tuple(one for one in some if not one.startswith(f"{HOME}/")) for name, some in places.items()}
    return {name: some for name, some in kept.items() if some}
