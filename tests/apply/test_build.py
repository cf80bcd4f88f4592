# SPDX-License-Identifier: Apache-2.0
"""Kernels: built with the real nvcc, rebuilt by content, reported, and failing without touching the tree."""

from __future__ import annotations

import ctypes
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from applier import ptxas
from applier.arch import Gpu, parse_arches, runs_on, shared_limit
from applier.errors import UsageError
from checkout import KERNEL, ROOT, Checkout, tree_hash


def rows(checkout: Checkout, arch: str = "90a,120", **environment: str) -> list[dict[str, object]]:
    run = checkout.run("build", "--arch", arch, "--json", **environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def test_report_of_every_kernel_and_architecture(checkout: Checkout) -> None:
    found = rows(checkout)
    assert [(row["kernel"], row["arch"]) for row in found] == [("tv_small", "90a"), ("tv_small", "120")]
    for row in found:
        assert row["shared_bytes"] == 128 + 1024, "static and dynamic"
        assert row["spill_bytes"] == 0 and 0 < int(str(row["registers"])) <= 255 and row["threads"] == 32


def test_a_spill_is_reported(checkout: Checkout) -> None:
    """Control for the zeros above: a kernel held to few registers does spill."""
    body = "".join(f"  float v{i} = in[{i} * n];\n" for i in range(200))
    use = " + ".join(f"v{i} * v{199 - i}" for i in range(200))
    kernel = f"__launch_bounds__(1024, 2) tv_small(float* out, const float* in, int n) {{\n{body}  __syncthreads();\n"
    source = KERNEL[KERNEL.index('extern "C" int') :]
    (checkout.root / "kernels/small.cu").write_text(
        f'extern "C" __global__ void {kernel}  out[threadIdx.x] = {use};\n}}\n{source}'
    )
    assert all(int(str(row["spill_bytes"])) > 0 for row in rows(checkout))
    report = checkout.root / "rows.json"
    report.write_text(json.dumps(rows(checkout)))
    judged = subprocess.run([sys.executable, ROOT / "scripts/check_kernels.py", report], capture_output=True, text=True)
    assert judged.returncode == 1 and "spills" in judged.stdout


def test_rebuilds_go_by_content(checkout: Checkout) -> None:
    rows(checkout)
    obj = checkout.root / "build/kernels/90a_120/obj/small.o"
    first = obj.stat().st_mtime_ns
    for path in (checkout.root / "kernels").iterdir():
        os.utime(path)
    assert rows(checkout) and obj.stat().st_mtime_ns == first, "touched, not changed: nothing compiled"
    header = checkout.root / "kernels/shared.cuh"
    header.write_text(header.read_text().replace("2.0f", "3.0f"))
    assert rows(checkout) and obj.stat().st_mtime_ns != first, "a header the unit includes changed"


def test_units_may_be_for_some_architectures_only(checkout: Checkout) -> None:
    (checkout.root / "kernels/hopper.cu").write_text(
        "// tv-arches: 90 90a\n#ifndef TV_HOST_ONLY\n"
        'extern "C" __global__ void tv_hopper(float* out) { out[threadIdx.x] = 1; }\n'
        "#endif\nint host_symbol() { return 1; }\n"
    )
    named = [(row["kernel"], row["arch"]) for row in rows(checkout)]
    assert named == [("tv_hopper", "90a"), ("tv_small", "90a"), ("tv_small", "120")]
    assert {row["kernel"] for row in rows(checkout, "120")} == {"tv_small"}


def test_a_debug_library_has_its_own_checks_and_else_the_same_objects(checkout: Checkout) -> None:
    (checkout.root / "kernels/probe.cu").write_text(
        "// A comment.\n// tv-debug\n#ifdef TV_DEBUG\n#define CHECKS 1\n#else\n#define CHECKS 0\n#endif\n"
        'extern "C" int checks() { return CHECKS; }\n'
    )
    folder = checkout.root / "build/kernels/120"
    run = checkout.run("build", "--arch", "120", "--debug")
    assert run.returncode == 0 and "libtreeverify-debug.so" in run.stderr, run.stderr
    small = folder / "obj/small.o"
    assert {path.name for path in (folder / "obj").glob("*.o")} == {"small.o", "probe.debug.o"}
    first = small.stat().st_mtime_ns
    assert [row["kernel"] for row in rows(checkout, "120")] == ["tv_small"] and small.stat().st_mtime_ns == first
    found = [ctypes.CDLL(str(folder / f"libtreeverify{kind}.so")).checks() for kind in ("", "-debug")]
    assert found == [0, 1]


def test_apply_builds_records_and_reverts(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    assert checkout.run("apply", "--arch", "120").returncode == 0
    library = checkout.package / "srt/treeverify/_kernels/libtreeverify.so"
    assert library.is_file()
    state = json.loads(checkout.run("status", "--json").stdout)
    assert state["kernels"] == [{"arch": "120", "state": "built"}] and state["state"] == "applied"
    again = checkout.run("apply")
    assert again.returncode == 0 and "nothing to do" in again.stdout, "the tree's own architectures are kept"
    assert "nothing to do" in checkout.run("apply", "--no-build").stdout
    (checkout.root / "kernels/shared.cuh").write_text("#pragma once\n#define SCALE 4.0f\n")
    state = json.loads(checkout.run("status", "--json").stdout)
    assert state["kernels"] == [{"arch": "120", "state": "stale"}] and state["state"] == "drifted"
    assert checkout.run("apply").returncode == 0
    assert checkout.run("status").returncode == 0
    library.write_bytes(library.read_bytes()[:-1])
    state = json.loads(checkout.run("status", "--json").stdout)
    assert state["kernels"] == [{"arch": "120", "state": "edited"}]
    assert checkout.run("apply").returncode == 0
    assert checkout.run("status").returncode == 0
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == before


def test_failing_compiler_is_exit_4_and_leaves_the_tree(checkout: Checkout) -> None:
    (checkout.root / "kernels/broken.cu").write_text('extern "C" __global__ void tv_broken() {\n  not_a_thing();\n}\n')
    before = tree_hash(checkout.package)
    run = checkout.run("apply", "--arch", "120")
    assert run.returncode == 4
    assert "kernels/broken.cu(2): error: identifier" in run.stderr and "not_a_thing" in run.stderr
    assert tree_hash(checkout.package) == before
    (checkout.root / "kernels/broken.cu").unlink()
    assert checkout.run("apply", "--arch", "120").returncode == 0


def test_library_that_does_not_load_is_exit_4(checkout: Checkout) -> None:
    (checkout.root / "kernels/loose.cu").write_text("int nowhere();\nint loose() { return nowhere(); }\n")
    before = tree_hash(checkout.package)
    run = checkout.run("apply", "--arch", "120")
    assert run.returncode == 4 and "nowhere" in run.stderr
    assert tree_hash(checkout.package) == before


def test_missing_nvcc_says_what_to_do(checkout: Checkout, tmp_path: Path) -> None:
    before = tree_hash(checkout.package)
    run = checkout.run("apply", "--arch", "120", CUDA_HOME=str(tmp_path))
    assert run.returncode == 4 and "has no bin/nvcc" in run.stderr and "--no-build" in run.stderr
    assert tree_hash(checkout.package) == before
    fake = tmp_path / "cuda/bin/nvcc"
    fake.parent.mkdir(parents=True)
    fake.write_text("#!/bin/sh\necho nvcc of another world\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    run = checkout.run("apply", "--arch", "120", CUDA_HOME=str(tmp_path / "cuda"))
    assert run.returncode == 4 and "another world" in run.stderr
    assert tree_hash(checkout.package) == before
    assert checkout.run("apply", "--no-build").returncode == 0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_no_gpu_and_no_arch_is_said(checkout: Checkout) -> None:
    before = tree_hash(checkout.package)
    for command in ("apply", "build"):
        run = checkout.run(command)
        assert run.returncode == 2 and "--arch" in run.stderr and "--no-build" in run.stderr
    assert tree_hash(checkout.package) == before


def test_gpus_found_choose_the_architectures(checkout: Checkout, tmp_path: Path) -> None:
    """A machine with two cards, as nvidia-smi prints them."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771 MiB, 580.65.06'\n"
        "echo 'NVIDIA RTX PRO 6000 Blackwell, 12.0, 97887 MiB, 580.65.06'\n"
    )
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    found = json.loads(checkout.run("build", "--json", PATH=path).stdout)
    assert {row["arch"] for row in found} == {"90a", "120"}
    doctor = json.loads(checkout.run("doctor", "--json", PATH=path).stdout)
    assert [gpu["arch"] for gpu in doctor["gpus"]] == ["90a", "120"] and doctor["driver"] == "580.65.06"


def test_doctor_names_what_to_mend(checkout: Checkout) -> None:
    run = checkout.run("doctor", "--json", "--python", "/no/such/python")
    report = json.loads(run.stdout)
    assert run.returncode == 1 and any("--python" in str(item["remedy"]) for item in report["mend"])
    assert report["nvcc"]["version"].startswith("1") and report["tree"]["state"] == "clean"
    assert set(report) >= {"gpus", "driver", "nvcc", "packages", "tree", "mend"}


@pytest.mark.parametrize(("text", "arches"), [("90a,120", ["90a", "120"]), ("sm_120, 80,80", ["80", "120"])])
def test_arches_are_parsed(text: str, arches: list[str]) -> None:
    assert parse_arches(text) == arches


@pytest.mark.parametrize("text", ["", "75", "hopper", "9.0"])
def test_bad_arches_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arches(text)


def test_shared_memory_limits() -> None:
    assert [shared_limit(arch) for arch in ("80", "86", "90a", "120")] == [166912, 101376, 232448, 101376]


def test_ptxas_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'tv_a' for 'sm_90a'\n"
        "ptxas info    : Function properties for tv_a\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'tv_b' for 'sm_120'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 0 barriers\n"
    )
    assert list(ptxas.parse(log)) == [ptxas.Usage("tv_a", "90a", 168, 16, 1024), ptxas.Usage("tv_b", "120", 32, 0, 0)]


def test_serve_and_selftest_need_an_applied_tree(checkout: Checkout) -> None:
    run = checkout.run("serve", "--", "--model-path", "x")
    assert run.returncode == 1 and "apply" in run.stderr
    if not Path("/dev/nvidiactl").exists():
        run = checkout.run("selftest")
        assert run.returncode == 2 and "GPU" in run.stderr


def test_serve_runs_the_patched_tree(checkout: Checkout) -> None:
    (checkout.package / "launch_server.py").write_text(
        "import sys, sglang.srt.treeverify\nprint('serving', *sys.argv[1:])\n"
    )
    assert checkout.run("apply", "--arch", "120").returncode == 0
    run = checkout.run("serve", "--", "--model-path", "x")
    assert run.returncode == 0 and run.stdout.endswith("serving --model-path x\n"), run.stderr


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def with_gpus(folder: Path, *cards: str) -> dict[str, str]:
    """An environment whose nvidia-smi lists cards like "Quadro P400, 6.1"."""
    lines = "".join(f"echo '{card}, 1 MiB, 580.1'; " for card in cards)
    script(folder / "nvidia-smi", lines or "exit 1")
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_cards_older_than_sm_80_get_no_kernels(checkout: Checkout, tmp_path: Path) -> None:
    both = with_gpus(tmp_path / "both", "Quadro P400, 6.1", "RTX PRO 6000, 12.0")
    run = checkout.run("build", "--json", **both)
    assert run.returncode == 0 and {row["arch"] for row in json.loads(run.stdout)} == {"120"}
    assert "Quadro P400 (sm_61) is older than sm_80" in run.stderr
    run = checkout.run("build", **with_gpus(tmp_path / "old", "Tesla T4, 7.5"))
    assert run.returncode == 2 and "Tesla T4 (sm_75)" in run.stderr and "--arch" in run.stderr


@pytest.mark.parametrize(
    "arch, capability, runs",
    [("80", "8.9", True), ("89", "8.6", False), ("90a", "9.0", True), ("90", "9.0", True), ("120", "12.1", True)]
    + [("90a", "10.0", False), ("120", "9.0", False), ("100", "12.0", False)],
)
def test_which_code_runs_on_which_card(arch: str, capability: str, runs: bool) -> None:
    assert runs_on(arch, Gpu("card", capability, "", "")) is runs


def test_serve_refuses_a_tree_without_code_for_the_card(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.package / "launch_server.py").write_text("print('serving')\n")
    assert checkout.run("apply", "--arch", "120").returncode == 0
    run = checkout.run("serve", "--", "x", **with_gpus(tmp_path / "h200", "NVIDIA H200, 9.0"))
    assert run.returncode == 1 and "sm_90a" in run.stderr and f"--sglang {checkout.package} --arch 90a" in run.stderr
    run = checkout.run("serve", "--", "x", **with_gpus(tmp_path / "pro", "RTX PRO 6000, 12.0"))
    assert run.returncode == 0 and "serving" in run.stdout


def test_an_nvcc_too_old_for_the_card_is_passed_over(checkout: Checkout, tmp_path: Path) -> None:
    script(tmp_path / "old" / "bin" / "nvcc", "echo 'Build V12.0.140'")
    run = checkout.run("build", "--arch", "120", "--json", CUDA_HOME=str(tmp_path / "old"))
    assert run.returncode == 0 and "12.0.140, too old for sm_120 (CUDA 12.8)" in run.stderr


def test_words_of_a_compiler_that_gives_up_are_shown_once(checkout: Checkout, tmp_path: Path) -> None:
    fatal = "nvcc fatal   : Unsupported gpu architecture"
    script(tmp_path / "bad" / "bin" / "nvcc", f'[ "$1" = --version ] && echo V13.0.88 && exit\necho "{fatal}"; exit 1')
    run = checkout.run("build", "--arch", "120", CUDA_HOME=str(tmp_path / "bad"))
    assert run.returncode == 4 and run.stderr.count(fatal) == 1


def test_further_architectures_join_those_of_the_tree(checkout: Checkout) -> None:
    assert checkout.run("apply", "--arch", "120").returncode == 0
    run = checkout.run("apply", "--arch", "90a")
    assert run.returncode == 0 and "keeps its kernels for sm_120" in run.stderr
    state = json.loads(checkout.run("status", "--json").stdout)
    assert [kernel["arch"] for kernel in state["kernels"]] == ["90a", "120"]


def test_a_wrong_arch_is_said_before_anything_is_fetched(checkout: Checkout) -> None:
    command = [sys.executable, str(checkout.root / "apply.py"), "apply", "--arch", "foo"]
    run = subprocess.run(command, capture_output=True, text=True, env=checkout.env(), check=False)
    assert run.returncode == 2 and "'foo'" in run.stderr
    assert not list((checkout.root / "build").glob("sglang-*"))


def test_what_is_not_ours_is_handed_on(checkout: Checkout) -> None:
    (checkout.package / "launch_server.py").write_text("import sys\nprint('serving', *sys.argv[1:])\n")
    assert checkout.run("apply", "--arch", "120").returncode == 0
    run = checkout.run("serve", "--model-path", "x y", "--port", "1", "--", "--pin", "z")
    assert run.stdout.endswith("serving --model-path x y --port 1 --pin z\n"), run.stderr
    run = checkout.run("status", "--model-path", "x")
    assert run.returncode == 2 and "unrecognized arguments: --model-path x" in run.stderr


def test_another_sglang_in_the_current_folder_is_not_run(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.package / "launch_server.py").write_text("print('serving')\n")
    assert checkout.run("apply", "--arch", "120").returncode == 0
    (tmp_path / "sglang").mkdir()
    command, env = checkout.command("serve", "--", "x"), checkout.env()
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert run.returncode == 2 and "would be run in place of" in run.stderr
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=checkout.package.parent, check=False)
    assert run.returncode == 0 and "serving" in run.stdout


def test_a_reader_that_leaves_early_is_no_error(checkout: Checkout) -> None:
    command = f"{' '.join(map(str, checkout.command('list')))} | true"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, env=checkout.env(), check=False)
    assert "Traceback" not in run.stderr and "error" not in run.stderr


def test_two_builds_at_once(checkout: Checkout) -> None:
    command = checkout.command("build", "--arch", "120", "--json")
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=checkout.env()) for _ in range(2)]
    started = time.monotonic()
    assert [json.loads(run.communicate()[0])[0]["kernel"] for run in runs] == ["tv_small"] * 2
    assert time.monotonic() - started < 300
