# SPDX-License-Identifier: Apache-2.0
"""The command line of apply.py."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from applier import bootstrap
from applier.checkoutfiles import pending, settle
from applier.errors import ApplierError, UsageError
from applier.examples import EXIT_CODES, epilog
from applier.layout import CHECKOUT
from applier.lock import locked
from applier.say import note, result_json
from applier.text import paint

COMPLETING = "_ARGCOMPLETE"
"""Set by the shell when it asks for completions; nothing else costs a thing then."""
NEEDS_TREE = ("apply", "check", "status", "revert", "refresh", "doctor", "selftest", "serve")


def main(arguments: list[str]) -> int:
    """Runs one command; gives the exit code."""
    if COMPLETING in os.environ:
        from applier.completion import complete

        complete(_parser())
    options = _parse(_with_default(arguments))
    as_json = getattr(options, "json", False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding has not
    try:
        bootstrap.require(*_modules(options))
        if pending(CHECKOUT.patches):
            with locked(CHECKOUT.patches, waiting=note):
                if settle(CHECKOUT.root, CHECKOUT.patches):
                    note("a change of the patches that was interrupted was finished")
        return _command(options.command)(options)
    except ApplierError as error:
        return _refuse(error, as_json)
    except PermissionError as error:
        return _refuse(UsageError(f"no permission for {error.filename}; run as the owner of its folder"), as_json)
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        done = "; taken back" if options.command in ("apply", "revert") else ""
        return _refuse(UsageError(f"{error.strerror or error}: {error.filename or 'while writing'}{done}"), as_json)
    except KeyboardInterrupt:
        note("interrupted")
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    """serve and selftest hand on what is not ours, with or without `--` in front."""
    parser = _parser()
    ours, theirs = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        ours, theirs = arguments[:at], arguments[at + 1 :]
    options, unknown = parser.parse_known_args(ours)
    options.arguments = [*unknown, *theirs]
    if options.arguments and options.command not in ("serve", "selftest"):
        parser.error(f"unrecognized arguments: {' '.join(options.arguments)}")
    return options


def _with_default(arguments: list[str]) -> list[str]:
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        return ["apply", *arguments]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apply.py",
        description="Patches a pinned SGLang with treeverify, and takes it back.",
        epilog=f"apply.py COMMAND --help shows each command with examples.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *flags: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog(name),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in NEEDS_TREE:
            sub.add_argument(
                "--sglang", type=Path, metavar="DIR", help="repository root, its python/, site-packages or package"
            )
            sub.add_argument("--pin", metavar="P", help="which release; told from the tree where left out")
        if "arch" in flags:
            sub.add_argument("--arch", metavar="A", help="like 90a,120; the GPUs found where left out")
        if "force" in flags:
            sub.add_argument(
                "--force", action="store_true", help="also where touched files differ, if every hunk is exact"
            )
            text = "also where touched files differ, if the patches merge without conflict"
            sub.add_argument("--3way", dest="three_way", action="store_true", help=text)
        if "json" in flags:
            sub.add_argument("--json", action="store_true", help="the result for a script")
        if "python" in flags:
            default = bootstrap.users_python()
            sub.add_argument(
                "--python", default=default, metavar="EXE", help="the Python that has SGLang's dependencies"
            )
        return sub

    sub = command("apply", "patch a tree; makes one from PyPI without --sglang (the default command)", "arch", "force")
    sub.add_argument("--no-build", action="store_true", help="patches and overlay only")
    sub = command("check", "everything apply does before it compiles and writes", "force", "json")
    sub.description = _paragraph(
        """Everything apply does before it compiles and writes. On a tree that is near a pin it names the
        nearest one and what differs, and says of every patch whether it applies cleanly (--force applies it), by
        three-way merge (--3way), is already upstream, or conflicts, with the lines it expects next to those found."""
    )
    command("status", "clean, applied, partial, drifted or edited", "json")
    sub = command("revert", "take everything back, byte for byte")
    sub.add_argument("--force", action="store_true", help="also with edited files; they are copied to build/ first")
    sub = command("refresh", "edits made in a patched tree, back into the patches and the overlay", "json")
    sub.description = _paragraph(
        """Brings edits made in a patched tree back into patches/ and overlay/, all or nothing. An edit
        goes into the last patch whose lines it changes, else into the one with the nearest hunk; new files of
        srt/treeverify go to the overlay. What was not edited keeps its bytes."""
    )
    sub.add_argument("--patch", metavar="NAME", help="every edit goes into this patch, not to the nearest hunk")
    sub.add_argument(
        "--add", action="append", default=[], metavar="PATH", help="also this file, which no patch touches yet"
    )
    sub.add_argument("--drop-empty", action="store_true", help="take out patches of which the tree has nothing left")
    sub.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    sub = command("port", "start a pin for another release from one there is", "json")
    sub.description = _paragraph(
        """Starts patches/PIN for another release: hunks that merge are in, files that moved are followed,
        the dtype contract is asked of the new sources. PORT.md in the new folder says what a person must settle: make
        those edits in a tree patched with --force, and bring them in with refresh --patch NAME."""
    )
    sub.add_argument("--from", dest="source", required=True, metavar="PIN", help="the pin to start from")
    sub.add_argument("--to", type=Path, required=True, metavar="DIR", help="the other release: like --sglang of apply")
    sub.add_argument("--name", metavar="PIN", help="of the new pin; v and the version that DIR says where left out")
    command("list", "pins and their patches", "json")
    sub = command("build", "compile the kernels into build/", "arch", "json")
    sub.add_argument(
        "--debug",
        action="store_true",
        help="a library that checks the indices it is given, and stops with the request: for TREEVERIFY_LIBRARY",
    )
    command("doctor", "what this machine has and what to mend", "json", "python")
    command("selftest", "every kernel on this machine's GPU against the reference (--json, --no-bench)", "python")
    command("serve", "start the patched server; everything else is handed to sglang.launch_server", "python")
    return parser


def _modules(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Python modules a command can't do without, and those it would like."""
    needed = ["tomli"] if sys.version_info < (3, 11) else []
    useful = []
    if options.command not in ("build",):
        needed.append("unidiff")
    tree = getattr(options, "sglang", None) or getattr(options, "to", None)
    if options.command == "apply" and tree is None and not any(CHECKOUT.build.glob("sglang-*")):
        needed.append("git")
    elif tree is not None and ((tree / ".git").exists() or (tree.absolute().parent / ".git").exists()):
        useful.append("git")
    builds = options.command == "build" or (options.command == "apply" and not options.no_build)
    if builds and shutil.which("ninja") is None:
        needed.append("ninja")
    if builds or options.command == "apply":
        useful.append("rich")
    return needed, useful


def _paragraph(text: str) -> str:
    """Text as help shows it: lines of 80 columns at most."""
    return textwrap.fill(" ".join(text.split()), 79)


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    from applier import commands

    return {
        "apply": commands.apply,
        "check": commands.check,
        "status": commands.status,
        "revert": commands.revert,
        "refresh": commands.refresh,
        "port": commands.port,
        "list": commands.list_pins,
        "build": commands.build_kernels,
        "doctor": commands.doctor,
        "selftest": commands.selftest,
        "serve": commands.serve,
    }[name]


def _refuse(error: ApplierError, as_json: bool) -> int:
    if as_json:
        told = {"ok": False, "exit": error.exit_code, "error": error.message, "details": error.details}
        result_json({**told, **error.data})
    note(f"{paint('error:', 'bad', sys.stderr)} {error.message}")
    for line in error.details:
        note(f"  {line}")
    return error.exit_code
