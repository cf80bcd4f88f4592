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
    sources = {file: _source(file, read(file)) for file in {row.file for row in pin.dtypes}}
    return [_check(row, sources[row.file]) for row in pin.dtypes]


def require_contract(pin: Pin, read: Read) -> None:
    """ContractError with the offending lines where a dtype differs or a site is gone."""
    if problems := problems_of(check_contract(pin, read)):
        raise ContractError(f"SGLang's dtypes are not those of {pin.name}'s contract; nothing was changed", problems)


def problems_of(rows: list[Checked]) -> list[str]:
    """What is wrong, each thing once: a file that can't be read is a problem of all its rows."""
    return list(dict.fromkeys(checked.problem for checked in rows if checked.problem))


def _source(file: str, data: bytes | None) -> Source | str | None:
    """The parsed file, None where it is missing, the problem where it is no Python."""
    if data is None:
        return None
    try:
        return Source(data)
    except SyntaxError as error:
        line = (error.text or "").strip()
        return f"{file}:{error.lineno or 1}: does not parse as Python ({error.msg}){': ' + line if line else ''}"
    except (ValueError, RecursionError) as error:  # null bytes; nesting without end
        return f"{file}:1: does not parse as Python ({error})"


def _check(row: DtypeRow, source: Source | str | None) -> Checked:
    if isinstance(source, str):
        return Checked(row, None, source)
    what = f"{row.backend} {row.path} {row.name}"
    if source is None:
        return Checked(row, None, f"{row.file}: no such file; wanted {what} ({row.dtype}) in {row.site}")
    try:
        finding = source.dtype_of(row.site, row.var, row.when, row.unless)
    except NotEstablished as error:
        return Checked(row, None, f"{row.file}:{error.line}: {what} ({row.dtype}): {error}")
    if finding.dtype != row.dtype:
        text = source.line(finding.line)
        problem = f"{row.file}:{finding.line}: {what} is {finding.dtype}, the contract says {row.dtype}: {text}"
        return Checked(row, finding, problem)
    return Checked(row, finding, None)
