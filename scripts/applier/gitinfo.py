# SPDX-License-Identifier: Apache-2.0
"""What git knows about a tree. GitPython is imported only where the tree has git."""

from __future__ import annotations

import os
from typing import Any

from applier.errors import UsageError
from applier.pin import Pin
from applier.tree import Tree

MADE_HERE = "treeverify@localhost"
HISTORY = 200  # commits of a file that are looked at


def commit_note(tree: Tree, pin: Pin) -> str | None:
    """One line where the checkout's commit is not the pin's; the blobs decide, so it is only a note."""
    if tree.git_root is None:
        return None
    try:
        head = _repo(tree).head.commit
        if head.author.email == MADE_HERE or head.hexsha == pin.commit:
            return None
        wanted = pin.commit or "not known"
        return f"HEAD is {head.hexsha[:12]}, the pin's commit is {wanted[:12]}; the touched files decide"
    except Exception as error:
        return f"git could not be asked about {tree.git_root} ({type(error).__name__}); the touched files decide"


def head_commit(tree: Tree) -> str | None:
    """The commit a checkout is at; None without git, and for a tree that was made here."""
    if tree.git_root is None:
        return None
    try:
        head = _repo(tree).head.commit
        return None if head.author.email == MADE_HERE else str(head.hexsha)
    except Exception:
        return None


def head_holds(tree: Tree, path: str, blob: str) -> bool:
    """Whether HEAD has `blob` as that file."""
    if tree.git_root is None:
        return False
    try:
        rel = tree.path(path).relative_to(tree.git_root).as_posix()
        return bool((_repo(tree).head.commit.tree / rel).hexsha == blob)
    except Exception:
        return False


def commit_without(tree: Tree, path: str, word: bytes) -> str | None:
    """The newest commit on the way to HEAD that has a file without `word` in it; None where there is none."""
    if tree.git_root is None:
        return None
    try:
        rel = tree.path(path).relative_to(tree.git_root).as_posix()
        for commit in _repo(tree).iter_commits(paths=rel, max_count=HISTORY):
            for state in (commit, *commit.parents):  # what a merge brought in, a parent may lack
                if (found := _file(state, rel)) is not None and word not in found:
                    return str(state.hexsha)
    except Exception:
        return None
    return None


def _file(commit: Any, rel: str) -> bytes | None:
    try:
        return bytes((commit.tree / rel).data_stream.read())
    except KeyError:
        return None


def blob_content(tree: Tree, blob: str) -> bytes | None:
    """A blob of the tree's repository, None where it isn't there."""
    if tree.git_root is None:
        return None
    try:
        return bytes(_repo(tree).odb.stream(bytes.fromhex(blob)).read())
    except Exception:
        return None


def commit_tree(folder: str, message: str) -> None:
    """Makes `folder` a repository with one commit that depends on its content and `message` alone."""
    git = _git().Git(folder)
    person = {"NAME": "treeverify", "EMAIL": MADE_HERE, "DATE": "2000-01-01T00:00:00+0000"}
    stamp = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in person.items()}
    with git.custom_environment(**stamp, GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull):
        git.execute(["git", "init", "--quiet", "--initial-branch=main", "--template="])
        git.execute(["git", "add", "--all", "--force"])
        git.execute(["git", "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message", message])


def _repo(tree: Tree) -> Any:
    return _git().Repo(tree.git_root)


def _git() -> Any:
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    try:
        import git
    except ImportError:
        raise UsageError(
            "GitPython is not installed; `pip install GitPython`, or give --sglang a tree without git"
        ) from None
    return git
