# SPDX-License-Identifier: Apache-2.0
"""A small treeverify checkout with a small release to patch: the real tool, a package of three files."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

from applier.blob import blob_id

ROOT = Path(__file__).resolve().parents[2]

ALPHA = textwrap.dedent(
    """\
    import torch


    class Backend:
        def __init__(self, size):
            self.indptr = torch.zeros((size + 1,), dtype=torch.int32)

        def verify(self, bs):
            indptr = self.indptr[: bs + 1]
            return indptr
    """
)
BETA = "".join(f"line {i}\n" for i in range(1, 41))
HEADER = """\
Description: {title}
 What it is for, in a sentence or two.
Pin: v1
Touches: {touches}
Needs: nothing
Upstream: none
Remove-When: never
Test: tests/apply

"""
FIRST = """\
--- a/python/sglang/srt/alpha.py
+++ b/python/sglang/srt/alpha.py
@@ -8,3 +8,5 @@ class Backend:
     def verify(self, bs):
         indptr = self.indptr[: bs + 1]
+        if hooked():
+            return served(indptr)
         return indptr
--- a/python/sglang/srt/beta.py
+++ b/python/sglang/srt/beta.py
@@ -4,3 +4,3 @@
 line 4
-line 5
+line five
 line 6
"""
SECOND = """\
--- a/python/sglang/srt/beta.py
+++ b/python/sglang/srt/beta.py
@@ -30,3 +30,4 @@
 line 30
+line 30 and a half
 line 31
 line 32
"""
KERNEL = """\
#include "shared.cuh"
extern "C" __global__ void tv_small(float* out) {
  __shared__ float tile[32];
  tile[threadIdx.x] = SCALE * threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}
extern "C" int tv_kernel_info(int i, const char** name, int* dynamic_smem_bytes, int* threads) {
  if (i != 0) return 1;
  *name = "tv_small";
  *dynamic_smem_bytes = 1024;
  *threads = 32;
  return 0;
}
"""


@dataclass
class Checkout:
    """`root` is a treeverify checkout, `package` the sglang package it patches."""

    root: Path
    package: Path

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """apply.py as a user runs it."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.env(environment), check=False
        )

    def command(self, *arguments: object) -> list[str]:
        tree = ["--sglang", str(self.package)] if arguments and arguments[0] not in ("list", "build") else []
        return [sys.executable, str(self.root / "apply.py"), str(arguments[0]), *tree, *map(str, arguments[1:])]

    def env(self, changes: dict[str, str] | None = None) -> dict[str, str]:
        cache = {"TREEVERIFY_CACHE": str(self.cache)} if self.cache.exists() else {}
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **cache, **(changes or {})}

    def keep_wheel(self) -> None:
        """The package as it is now, as the wheel that the pin's release would be fetched as."""
        (self.cache / "wheels").mkdir(parents=True)
        with zipfile.ZipFile(self.cache / "wheels/sglang-1.0-py3-none-any.whl", "w") as wheel:
            for path in sorted(self.package.rglob("*.py")):
                wheel.write(path, path.relative_to(self.package.parent).as_posix())

    def write_pin(self) -> None:
        """pin.toml for the package as it is now."""
        blobs = "".join(
            f'"{p}" = "{blob_id((self.package / p).read_bytes())}"\n' for p in ("srt/alpha.py", "srt/beta.py")
        )
        (self.pin / "pin.toml").write_text(
            '[pin]\nname = "v1"\ntag = "v1"\npypi = "1.0"\nrequires_python = ">=3.10"\ndefault = true\n'
            f"[blobs]\n{blobs}"
            '[[dtype]]\nbackend = "alpha"\npath = "eager"\nname = "indptr"\ndtype = "int32"\n'
            'file = "srt/alpha.py"\nsite = "Backend.verify"\n'
        )

    @property
    def cache(self) -> Path:
        return self.root.parent / "cache"

    @property
    def pin(self) -> Path:
        return self.root / "patches" / "v1"

    def write_patch(self, name: str, title: str, touches: str, hunks: str) -> None:
        (self.pin / name).write_text(HEADER.format(title=title, touches=touches) + hunks)
        names = sorted(path.name for path in self.pin.glob("*.patch"))
        (self.pin / "series").write_text("\n".join(names) + "\n")


def make_checkout(folder: Path) -> Checkout:
    """The tool copied, with its own pin, patches, overlay and kernels; the package beside it."""
    root = folder / "treeverify"
    compileall.compile_dir(ROOT / "scripts" / "applier", quiet=1)  # copied with its byte code: every run starts sooner
    shutil.copytree(ROOT / "scripts" / "applier", root / "scripts" / "applier")
    shutil.copy(ROOT / "scripts" / "check_dtypes.py", root / "scripts")
    shutil.copy(ROOT / "apply.py", root)
    package = folder / "site" / "sglang"
    files = {
        package / "__init__.py": "",
        package / "srt" / "__init__.py": "",
        package / "srt" / "alpha.py": ALPHA,
        package / "srt" / "beta.py": BETA,
        root / "overlay" / "srt" / "treeverify" / "__init__.py": '"""The overlay."""\n',
        root / "overlay" / "srt" / "treeverify" / "attention" / "ops.py": "def served(x):\n    return x\n",
        root / "kernels" / "small.cu": KERNEL,
        root / "kernels" / "shared.cuh": "#pragma once\n#define SCALE 2.0f\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    checkout = Checkout(root, package)
    checkout.pin.mkdir(parents=True)
    checkout.write_pin()
    checkout.write_patch("0001-hook.patch", "The backend calls the hook", "srt/alpha.py, srt/beta.py", FIRST)
    checkout.write_patch("0002-more.patch", "Half a line more", "srt/beta.py", SECOND)
    return checkout


def tree_hash(root: Path) -> str:
    """Digest of every name, kind, mode and content below a folder, .git left out."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if ".git" in path.relative_to(root).parts:
            continue
        mode = path.lstat().st_mode
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        digest.update(os.fsencode(f"{path.relative_to(root)} {mode:o} {hashlib.sha256(data).hexdigest()}\n"))
    return digest.hexdigest()
