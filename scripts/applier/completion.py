# SPDX-License-Identifier: Apache-2.0
"""Completion in bash, zsh and fish, by argcomplete where the interpreter has it; nothing is set up for it."""

from __future__ import annotations

import argparse
import sys

from applier.errors import ApplierError
from applier.layout import CHECKOUT
from applier.toolchain import KNOWN_SINCE

ARCHES = sorted({"80", "86", "89", "90a", *KNOWN_SINCE} - {"90"}, key=lambda arch: int(arch.rstrip("a")))


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and ends the process; silent where argcomplete is missing."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)
    for sub in _parsers(parser):
        for action in sub._actions:
            if "--pin" in action.option_strings:
                _set(action, _pins)
            elif "--arch" in action.option_strings:
                _set(action, _arches)
            elif action.metavar == "DIR":
                _set(action, argcomplete.DirectoriesCompleter())
    argcomplete.autocomplete(parser, always_complete_options="long")


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Those of the commands."""
    found: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


def _set(action: argparse.Action, completer: object) -> None:
    """Where argcomplete looks for it."""
    vars(action)["completer"] = completer


def _pins(**_: object) -> list[str]:
    try:
        from applier.pin import load_pins  # Python 3.10 needs tomli for it

        return [pin.name for pin in load_pins(CHECKOUT)]
    except (ApplierError, ImportError):
        return []


def _arches(prefix: str = "", **_: object) -> list[str]:
    """The last of a list like 90a,120."""
    before, comma, _last = prefix.rpartition(",")
    return [f"{before}{comma}{arch}" for arch in ARCHES if arch not in before.split(",")]
