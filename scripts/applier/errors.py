# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class an exit code. A message says what, where and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ApplierError(Exception):
    """Base of all refusals: `message` is one line, `details` the evidence, one line each, `data` more for --json."""

    exit_code = 2

    def __init__(self, message: str, details: Sequence[str] = (), data: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = list(details)
        self.data = dict(data or {})


class UsageError(ApplierError):
    """Wrong arguments, or a machine that lacks what the command needs."""

    exit_code = 2


class DriftError(ApplierError):
    """The tree is not what the patches expect."""

    exit_code = 1


class ContractError(ApplierError):
    """A dtype of SGLang differs from the pin's contract."""

    exit_code = 3


class BuildError(ApplierError):
    """The kernels did not compile."""

    exit_code = 4
