# SPDX-License-Identifier: Apache-2.0
"""The dtype contract: what a pin promises of SGLang's tensors against what the source says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from applier.errors import ContractError
from applier.pin import DtypeRow, Pin
from applier.source_dtypes import Finding, NotEstablished, Source

Read = Callable[[str], "bytes | None"]


@dataclass(frozen=True)
class Checked:
    """A row of the contract with what was found; `finding` is None where the site could not be read."""

    row: DtypeRow
    finding: Finding | None
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        found = self.finding
        return {
            "backend": self.row.backend,
            "path": self.row.path,
            "name": self.row.name,
            "contract": self.row.dtype,
            "found": found.dtype if found else None,
            "file": self.row.file,
            "line": found.line if found else None,
            "site": self.row.site,
            "ok": self.problem is None,
            "problem": self.problem,
        }


def check_contract(pin: Pin, read: Read) -> list[Checked]:
    """Reads every site of the contract; never imports SGLang. `read` gives a file of the package."""
    sources: dict[str, Source | None] = {}
    for file in {row.file for row in pin.dtypes}:
        data = read(file)
        sources[file] = None if data is None else Source(data)
    return [_check(row, sources[row.file]) for row in pin.dtypes]


def require_contract(pin: Pin, read: Read) -> None:
    """ContractError with the offending lines where a dtype differs or a site is gone."""
    problems = [checked.problem for checked in check_contract(pin, read) if checked.problem]
    if problems:
        raise ContractError(f"SGLang's dtypes are not those of {pin.name}'s contract; nothing was changed", problems)


def _check(row: DtypeRow, source: Source | None) -> Checked:
    what = f"{row.backend} {row.path} {row.name}"
    if source is None:
        return Checked(row, None, f"{row.file}: no such file; wanted {what} ({row.dtype}) in {row.site}")
    try:
        finding = source.dtype_of(row.site, row.var, row.when)
    except NotEstablished as error:
        return Checked(row, None, f"{row.file}:{error.line}: {what} ({row.dtype}): {error}")
    if finding.dtype != row.dtype:
        text = source.line(finding.line)
        problem = f"{row.file}:{finding.line}: {what} is {finding.dtype}, the contract says {row.dtype}: {text}"
        return Checked(row, finding, problem)
    return Checked(row, finding, None)
