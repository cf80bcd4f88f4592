#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tool where users are, by hand and as root: python3 tests/apply/bare_debian.py FOLDER [--bind DIR …].

Makes a Debian in FOLDER with python3 and nothing else, and in it, one after the other: a tree without git or compiler,
the tree the tool makes by itself with PyPI's nvcc, a checkout that is installed as SGLang's docker images have it, and
`pip install sglang` in a venv. --bind shows folders of this machine there, where pip takes wheels from one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ("etc/apt/sources.list.d", "etc/apt/keyrings", "usr/share/keyrings", "etc/apt/apt.conf.d")
CARRIED += ("etc/pip.conf", "etc/xdg/pip", "etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt")
PASSED = ("PIP_", "http", "https", "no_proxy", "HTTP", "HTTPS", "NO_PROXY", "SSL_", "REQUESTS_")

START = """
cd /root/treeverify
fails() { if "$@" > /dev/null 2>&1; then echo "not expected to work: $*"; exit 1; fi; }
"""
WITHOUT_GIT = """
for command in git g++ nvcc ninja; do fails command -v $command; done
fails python3 -m pip --version
python3 - <<'END'
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
from applier import bootstrap
bootstrap.require(["tomli"] if sys.version_info < (3, 11) else [])
from applier.layout import CHECKOUT
from applier.obtain import fetch_wheel
from applier.pin import choose_pin
import zipfile
zipfile.ZipFile(fetch_wheel(choose_pin(CHECKOUT, None))).extractall("/srv/plain")
END
cp -a /srv/plain /srv/before
python3 apply.py apply --no-build --sglang /srv/plain
python3 apply.py status --sglang /srv/plain
python3 apply.py revert --sglang /srv/plain
diff -r /srv/before /srv/plain
fails command -v git
"""
MADE_HERE = """
python3 apply.py --arch 120
python3 apply.py status
case "$(python3 apply.py doctor --json)" in *"PyPI nvidia-cuda-nvcc"*) ;; *) exit 1 ;; esac
"""
DOCKER = """
mkdir -p /sgl-workspace
cp -a build/sglang-* /sgl-workspace/sglang
cd /sgl-workspace/sglang
git checkout -q -- . && git clean -qfdx
cat > python/pyproject.toml <<'END'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang"
version = "0"
[tool.setuptools.packages.find]
include = ["sglang*"]
END
git add . && git -c user.name=a -c user.email=a@b commit -qm pyproject
python3 -m venv /opt/docker && /opt/docker/bin/pip install -q --no-deps -e python
git clean -qfdx  # the egg-info
site=$(/opt/docker/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd -
python3 apply.py apply --no-build --sglang "$site"
python3 apply.py status --sglang /sgl-workspace/sglang
found=$(cd / && /opt/docker/bin/python -c 'import importlib.util as u; print(u.find_spec("sglang").origin)')
test "$found" = /sgl-workspace/sglang/python/sglang/__init__.py
test -f /sgl-workspace/sglang/python/sglang/srt/treeverify/_manifest.json
python3 apply.py revert --sglang /sgl-workspace/sglang/python
find /sgl-workspace/sglang -name __pycache__ -prune -exec rm -r {} +
test -z "$(git -C /sgl-workspace/sglang status --porcelain --ignored)"
"""
INSTALLED = """
python3 -m venv /opt/installed
/opt/installed/bin/pip install -q --no-deps ~/.cache/treeverify/wheels/sglang-*.whl
site=$(/opt/installed/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
check='import importlib.metadata as m, base64, hashlib, sys
bad = [str(f) for f in m.files("sglang") if f.hash and base64.urlsafe_b64encode(
    hashlib.new(f.hash.mode, f.read_binary()).digest()).rstrip(b"=").decode() != f.hash.value]
print(len(bad), "files are not as in RECORD"); sys.exit(bool(bad))'
/opt/installed/bin/python apply.py apply --no-build --sglang "$site"
/opt/installed/bin/python apply.py status --sglang "$site/sglang"
fails /opt/installed/bin/python -c "$check"
/opt/installed/bin/python apply.py revert --sglang "$site"
/opt/installed/bin/python -c "$check"
"""
STEPS = {"without git": WITHOUT_GIT, "made here": MADE_HERE, "docker": DOCKER, "installed": INSTALLED}


def make(folder: Path, suite: str, binds: list[Path]) -> None:
    """A Debian with python3, this machine's sources of packages, and a copy of this checkout as it is committed."""
    command = ["debootstrap", "--variant=minbase", "--include=python3,ca-certificates", suite, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name in CARRIED:
        source = Path("/") / name
        for path in source.rglob("*") if source.is_dir() else [source]:
            target = folder / path.relative_to("/")
            if path.is_file() and target.parent.resolve() == target.parent:  # no link of the Debian leads out of it
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                shutil.copyfile(path, target)
    for bind in binds:
        (folder / bind.relative_to("/")).mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "-q", ROOT, folder / "root/treeverify"], check=True)


def run(folder: Path, binds: list[Path], script: str) -> int:
    """A script in there; what is mounted is seen by it alone."""
    mounts = [f"mount -t proc proc {folder}/proc", f"mount --bind /dev {folder}/dev"]
    mounts += [f"mount --bind {bind} {folder}{bind}" for bind in binds]
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8", **passed}
    inside = ["chroot", str(folder), "bash", "-euo", "pipefail", "-c", START + script]
    command = ["unshare", "--mount", "sh", "-c", f"{' && '.join(mounts)} && exec \"$@\"", "sh", *inside]
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the Debian is made; must not be there")
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--bind", type=Path, action="append", default=[], metavar="DIR")
    options = parser.parse_args()
    folder = options.folder.resolve()
    make(folder, options.suite, options.bind)
    for name, script in STEPS.items():
        print(f"== {name}", flush=True)
        if code := run(folder, options.bind, script):
            print(f"{name}: exit {code}")
            return 1
    print("all of them work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
