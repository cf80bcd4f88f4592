# SPDX-License-Identifier: Apache-2.0
"""What to do about a tree in some state: a reason, and the command to paste."""

from __future__ import annotations

from dataclasses import dataclass

from applier.release import Release
from applier.restoring import ways_back
from applier.settling import unsettled
from applier.state import State
from applier.tree import Tree


@dataclass(frozen=True)
class Advice:
    """One way on: what it does, and how to type it."""

    text: str
    command: str


def advice(tree: Tree, release: Release, state: State, where: str) -> list[Advice]:
    """Ways on from a state. `where` is what tells a command which tree is meant: " --sglang DIR", or nothing."""

    def run(text: str, command: str, rest: str = "") -> Advice:
        return Advice(text, f"python3 apply.py {command}{where}{rest}")

    unfinished = bool(unsettled(release.pin.folder))
    if state.foreign:
        return [run("take our files out and leave the other release as it is", "revert", " --force")]
    if state.state == "applied" and unfinished:
        return [run("bring in what you settled in the tree", "refresh", " --patch NAME"), run("take it back", "revert")]
    if state.state == "applied" and not state.kernels:
        return [run("build the kernels, without which it cannot serve", "apply"), run("take it back", "revert")]
    if state.state == "applied":
        return [run("start the server", "serve", " -- --model-path MODEL"), run("take it back", "revert")]
    if state.state == "clean" and unfinished:
        return [run("patch it with what fits, and settle the rest in the tree", "apply", " --no-build --force")]
    if state.state == "clean":
        return [run("patch it", "apply")]
    if state.state == "edited":
        back = "or take everything back; copies of the edited files are kept in build/"
        return [run("bring the edits into the patches", "refresh"), run(back, "revert", " --force")]
    if state.manifest is not None:
        return [
            run("bring it up to date", "apply", " --no-build --force" if unfinished else ""),
            run("or take it back", "revert"),
        ]
    if state.state == "drifted":
        return [
            run("see which hunks fit", "check"),
            run("patch it all the same, if every hunk stands exactly where it should", "apply", " --force"),
            run("or if the patches merge without conflict", "apply", " --3way"),
        ]
    return [
        *(Advice(*way) for way in ways_back(tree, release, state)),
        run("patch it, once nothing is in the way", "apply"),
    ]
