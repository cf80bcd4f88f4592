#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every table and plot of the README again, on this machine's GPU, and a page of them: OUT/page.md.
#
#   bash scripts/reproduce.sh [--out OUT] [STAGE ...]
#
# STAGE: setup | attention | host | acceptance | speed | long | page; all of them where none is named. A stage takes at most
# eight minutes, all together 25 on an H200. What is done is not done again: one that was cut off resumes. OUT is
# build/reproduce where it is not named. Where SGLang is not unpacked yet, setup installs it from PyPI, which takes longer.
# Exit 0 all done, or no GPU here (what is skipped is said); 1 a stage failed; 2 usage; 3 run it again to go on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stages=(setup attention host acceptance speed long page)
declare -A what=(
    [setup]="SGLang, patched, with the kernels built for this GPU, and the self-test"
    [attention]="a verify step's attention beside Triton, FlashInfer, FA3 and FlashMLA"
    [host]="host microseconds of a step"
    [acceptance]="tokens a step against the budget, trained models"
    [speed]="milliseconds and tokens a second of DDTREE, DFLASH and no speculation"
    [long]="a step at 100k tokens beside stock Triton's and stock FlashInfer's chain"
    [page]="tables and plots"
)
usage() {
    sed -n '/^#   bash/,/^# Exit/s/^# \{0,3\}//p' "$0" >&2
    exit 2
}

out=build/reproduce
wanted=()
while [ $# -gt 0 ]; do
    case $1 in
    --out) [ $# -gt 1 ] || usage; out=$2; shift ;;
    *) [ -n "${what[$1]:-}" ] || usage; wanted+=("$1") ;;
    esac
    shift
done
[ ${#wanted[@]} -gt 0 ] || wanted=("${stages[@]}")

if ! nvidia-smi -L >/dev/null 2>&1; then
    echo "No NVIDIA GPU here (nvidia-smi lists none), so nothing is measured:"
    for stage in "${wanted[@]}"; do [ "$stage" = page ] || echo "  skipped: $stage (${what[$stage]})"; done
    for folder in results/*/; do
        python3 scripts/results_page.py "$folder" --check && echo "Recorded on another machine: ${folder}page.md"
    done
    exit 0
fi

mkdir -p "$out"
out=$(realpath "$out")
TV_SITE=${TV_SITE:-}
if [ -z "$TV_SITE" ] && [ ! -e build/gpu/site ] && ! compgen -G "build/gpu/parts/*.tar.xz" >/dev/null; then
    venv=$PWD/build/reproduce-venv
    [ -e "$venv/bin/python" ] || python3 -m venv "$venv"
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
    TV_SITE=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    [ -e "$TV_SITE/sglang" ] || pip install --quiet "sglang==0.5.12.post1" matplotlib unidiff
fi
export TV_SITE
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
[ "$capability" = 90 ] && capability=90a
export TV_ARCH=${TV_ARCH:-$capability}

e2e() { bash scripts/gpu/e2e.sh "$1" "$out"; }
measure() {
    case $1 in
    setup) e2e setup ;;
    attention) TV_BENCH_STAGES=shapes TV_BUDGET_S=300 e2e bench ;;
    host) e2e marshal ;;
    acceptance) TV_STAGES=acceptance TV_BUDGET_S=240 e2e ddtree ;;
    speed) TV_STAGES=speed TV_BUDGET_S=460 e2e ddtree ;;
    long) TV_SERVERS=ngram,ngram_flashinfer,ngram_triton,ddtree,none TV_BUDGET_S=460 e2e long ;;
    page) python3 scripts/results_page.py "$out" --draw ;;
    esac
}

open=0
for stage in "${wanted[@]}"; do
    mark=$out/.$stage.done
    if [ -e "$mark" ] && [ "$stage" != page ]; then
        echo "== $stage: done before"
        continue
    fi
    echo "== $stage: ${what[$stage]}"
    begin=$SECONDS
    code=0
    measure "$stage" || code=$?
    echo "== $stage: $((SECONDS - begin)) s, exit $code"
    case $code in
    0) touch "$mark" ;;
    3) open=3 ;;
    *) echo "$stage failed; the logs are in $out" >&2; exit 1 ;;
    esac
done
[ $open = 0 ] || echo "Not all is measured yet: run it again to go on."
exit $open
