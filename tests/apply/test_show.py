# SPDX-License-Identifier: Apache-2.0
"""What people read: status, list, doctor and --help fit 80 columns, take colours on terminals only, say the way on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from applier import cli
from applier.examples import EXAMPLES
from checkout import ROOT, Checkout

ESCAPE = "\x1b["
Become = Callable[[Checkout], None]
OVERLAY = "srt/treeverify/attention/ops.py"


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine that runs the tests wants of colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def too_long(text: str) -> list[str]:
    """Lines over 80 columns that could have been shorter: commands to paste, and one word beside a label, stick out."""
    commands = re.compile(r"\s*(python3 apply.py|git|pip|\S+ -m pip) ")
    word = re.compile(r"\s*(\w+ {2,})?\S+")
    return [x for x in text.splitlines() if len(x) > 80 and not word.fullmatch(x) and not commands.match(x)]


def without_build(checkout: Checkout) -> None:
    assert checkout.run("apply", "--no-build").returncode == 0


def clean(checkout: Checkout) -> None:
    assert checkout.package.exists()


def edited(checkout: Checkout) -> None:
    without_build(checkout)
    (checkout.package / "srt/beta.py").write_text("mine\n")
    (checkout.package / OVERLAY).write_text("mine\n")


def half(checkout: Checkout) -> None:
    beta = (checkout.package / "srt/beta.py").read_text()
    without_build(checkout)
    (checkout.package / "srt/beta.py").write_text(beta)


def gone(checkout: Checkout) -> None:
    without_build(checkout)
    shutil.rmtree(checkout.package / "srt/treeverify")


def drifted(checkout: Checkout) -> None:
    (checkout.package / "srt/beta.py").write_text("another release\n")


def outdated(checkout: Checkout) -> None:
    without_build(checkout)
    (checkout.root / "overlay" / OVERLAY).write_text("def served(x):\n    return x + 1\n")


STATES = {
    clean: ("clean", "SGLang v1 as released", "apply"),
    without_build: ("applied", "patched for v1", "apply"),
    edited: ("edited", "patched for v1, and edited since", "refresh"),
    half: ("partial", "patched for v1, but not whole", "apply"),
    gone: ("partial", "patched for v1, but not whole", "revert"),
    drifted: ("drifted", "not SGLang v1, the nearest release", "check"),
    outdated: ("drifted", "patched for v1, but not as this checkout would", "apply"),
}


@pytest.mark.parametrize("become", STATES, ids=lambda become: become.__name__)
def test_status_says_what_why_and_the_way_on(checkout: Checkout, become: Become) -> None:
    become(checkout)
    state, meaning, first = STATES[become]
    run = checkout.run("status")
    assert run.returncode == (0 if state in ("clean", "applied") else 1) and not run.stderr
    assert run.stdout.startswith(f"{checkout.package}\n  {state}: {meaning}\n")
    assert ESCAPE not in run.stdout and not too_long(run.stdout)
    report = json.loads(checkout.run("status", "--json").stdout)
    ways = report["advice"]
    assert report["state"] == state and first in ways[0]["command"]
    for way in ways:
        assert way["command"] in run.stdout.splitlines()[-1] or f"  {way['command']}\n" in run.stdout
        assert f"--sglang {checkout.package}" in way["command"] or not way["command"].startswith("python3 apply.py")


@pytest.mark.parametrize("become", [clean, half, outdated], ids=lambda become: become.__name__)
def test_the_way_on_leads_on(checkout: Checkout, become: Become) -> None:
    """The first advice, as pasted, makes a patched tree of it."""
    become(checkout)
    command = shlex.split(json.loads(checkout.run("status", "--json").stdout)["advice"][0]["command"])
    assert command[:2] == ["python3", "apply.py"]
    ours = [sys.executable, str(checkout.root / "apply.py"), *command[2:], "--no-build"]
    run = subprocess.run(ours, capture_output=True, text=True, env=checkout.env(), check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(checkout.run("status", "--json").stdout)["state"] == "applied"


def test_files_that_differ_are_named_with_both_contents(checkout: Checkout) -> None:
    edited(checkout)
    shown = checkout.run("status").stdout
    assert re.search(r"\n  srt/beta.py\n    expected [0-9a-f]{12}, found [0-9a-f]{12}\n", shown)
    assert "overlay    1 file applied, 1 file edited" in shown


def test_list(checkout: Checkout) -> None:
    run = checkout.run("list")
    assert run.returncode == 0 and not too_long(run.stdout) and ESCAPE not in run.stdout
    assert "v1 (default)" in run.stdout and "The backend calls the hook" in run.stdout
    (pin,) = json.loads(checkout.run("list", "--json").stdout)
    assert (pin["name"], pin["pypi"], pin["default"]) == ("v1", "1.0", True)
    assert [patch["name"] for patch in pin["patches"]] == ["0001-hook.patch", "0002-more.patch"]
    assert pin["patches"][0]["files"] == ["srt/alpha.py", "srt/beta.py"] and pin["patches"][0]["remove_when"] == "never"


def test_the_real_ones_fit(stock_tree: Path, patched_tree: Path) -> None:
    pins = len(list((ROOT / "patches").glob("*/0004-ddtree.patch")))
    trees = (["status", "--sglang", stock_tree], ["status", "--sglang", patched_tree])
    for arguments, times in ((["list"], pins), *((tree, 1) for tree in trees)):
        command = [sys.executable, ROOT / "apply.py", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0 and not too_long(run.stdout), too_long(run.stdout)
        assert run.stdout.count("0004-ddtree") == times > 0


def terminal(checkout: Checkout, *arguments: object, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    main, other = pty.openpty()
    env = {key: value for key, value in checkout.env().items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm", "COLUMNS": "80", **environment}
    with subprocess.Popen(checkout.command(*arguments), stdout=other, stderr=other, env=env) as run:
        os.close(other)
        data = b""
        with contextlib.suppress(OSError):  # Linux says so at the end
            while part := os.read(main, 65536):
                data += part
        run.wait()
    os.close(main)
    return data.decode().replace("\r\n", "\n")


def test_colours_on_a_terminal_only(checkout: Checkout) -> None:
    half(checkout)
    for command in ("status", "list"):
        plain = checkout.run(command).stdout
        shown = terminal(checkout, command)
        assert ESCAPE in shown and ESCAPE not in plain
        assert re.sub(r"\x1b\[\d+m", "", shown).split() == plain.split()
    assert "\x1b[33mpartial\x1b[0m" in terminal(checkout, "status")


def test_the_word_of_the_environment(checkout: Checkout) -> None:
    assert ESCAPE not in terminal(checkout, "status", NO_COLOR="1")
    assert ESCAPE not in terminal(checkout, "status", NO_COLOR="1", FORCE_COLOR="1")
    assert ESCAPE not in terminal(checkout, "status", TERM="dumb")
    assert ESCAPE in terminal(checkout, "status", NO_COLOR="")
    assert ESCAPE in checkout.run("status", FORCE_COLOR="1", NO_COLOR="").stdout
    assert ESCAPE not in checkout.run("status", FORCE_COLOR="0").stdout
    assert ESCAPE not in checkout.run("status", "--json", FORCE_COLOR="1", NO_COLOR="").stdout
    assert "\x1b[31merror:\x1b[0m" in checkout.run("status", "--pin", "none", FORCE_COLOR="1", NO_COLOR="").stderr


def commands() -> list[str]:
    """Every command that there is."""
    (sub,) = (action for action in cli._parser()._actions if action.choices)
    return list(sub.choices or ())


@pytest.mark.parametrize("command", commands())
def test_help_fits_and_its_examples_are_right(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert EXAMPLES[command]
    for _, arguments in EXAMPLES[command]:
        assert f"\n  python3 apply.py {arguments}\n" in text
        assert cli._parse(shlex.split(arguments)).command == command


def test_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert all(f"\n    {command} " in text for command in commands()) and "\n  3  SGLang's dtypes" in text


def test_names_are_not_obeyed_by_the_terminal(checkout: Checkout) -> None:
    """Line ends, escapes and bytes of no encoding, in names of files that are not ours, whether or not all is."""
    without_build(checkout)
    for name in ("two\nlines.py", "esc\x1b[31m.py", "\udcff.py", ".\x1b[31m"):
        (checkout.package / "srt/treeverify" / name).write_text("")
    for commands in (["status"], ["apply", "--no-build"], ["refresh"], ["status", "--json"]), (["status"], ["check"]):
        for arguments in commands:
            run = checkout.run(*arguments, PYTHONIOENCODING="ascii:strict")
            text = run.stdout + run.stderr
            assert run.returncode in (1, 2) and "Traceback" not in text
            assert ESCAPE not in text and "\udcff" not in text and "two\nlines" not in text, arguments
            if arguments == ["status"]:
                for name in (r"two\nlines.py", r"esc\x1b[31m.py", r"\udcff.py"):
                    assert f"'srt/treeverify/{name}'" in text
        (checkout.package / "srt/treeverify/_manifest.json").unlink(missing_ok=True)
