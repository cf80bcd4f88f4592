# SPDX-License-Identifier: Apache-2.0
"""How a release of SGLang wants its parts made and called: a module a pin, all with the same names."""

from __future__ import annotations

import importlib
from types import ModuleType


def imported() -> ModuleType:
    """The module of the release on the path."""
    from sglang.version import __version__

    return importlib.import_module(f"{__name__}.v{__version__.replace('.', '_')}")
