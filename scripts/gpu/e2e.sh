#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# End-to-end stages on a GPU machine, each well under eight minutes; a stage that was cut off resumes.
#
#   bash scripts/gpu/e2e.sh STAGE [OUT]
#   STAGE: setup | attention | serve | judge | all | lossless | sampling | churn | bench | kv | marshal | ddtree | tp2 | soak | long | fuzz
#
# TV_RELEASE=17: SGLang v0.5.17, of which build/gpu/parts17, site17, outputs17 and results17 are.
# TV_MODES="ddtree ddtree_wide": only these modes of tests/e2e/modes.py in serve and judge.
#
# Expects, built beforehand where there is a network (docs/gpu.md): build/gpu/parts/*.tar.xz, the unpacked-site archive
# of SGLang; build/gpu/wheels/*.whl, what the applier needs and the machine lacks (unidiff). Models: $TV_TARGET and $TV_DRAFT,
# by default tests/data/tiny_mla. Results go to OUT (default build/gpu/results).
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=$1
release=${TV_RELEASE:-}
out=${2:-build/gpu/results$release}
site=${TV_SITE:-$PWD/build/gpu/site$release}
target=$(realpath "${TV_TARGET:-tests/data/tiny_mla/target}")
draft=$(realpath "${TV_DRAFT:-tests/data/tiny_mla/draft}")
outputs=build/gpu/outputs$release
export TREEVERIFY_COMMIT=${TREEVERIFY_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONUNBUFFERED=1 SGLANG_ENABLE_JIT_DEEPGEMM=0
mkdir -p "$out" "$outputs"

use_site() {
    [ -e "$site/bundle_env.sh" ] || return 0 # a site that is on the path already
    set +eu +o pipefail
    # shellcheck disable=SC1091
    . "$site/bundle_env.sh"
    set -eu -o pipefail
}

setup() {
    if [ ! -e "$site/.unpacked" ] && compgen -G "build/gpu/parts$release/*.tar.xz" >/dev/null; then
        mkdir -p "$site"
        for part in build/gpu/parts$release/*.tar.xz; do tar -xf "$part" -C "$site"; done
        python3 -m compileall -q -j 0 "$site" >/dev/null || true # servers import it side by side
        touch "$site/.unpacked"
    fi
    mkdir -p build/gpu/pylib
    for wheel in build/gpu/wheels/*.whl; do [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" build/gpu/pylib; done
    export PYTHONPATH=$PWD/build/gpu/pylib TREEVERIFY_NO_BOOTSTRAP=1
    python3 apply.py apply --sglang "$site/sglang" --arch "${TV_ARCH:-90a}"
    python3 apply.py status --sglang "$site/sglang"
    use_site
    python3 -m sglang.srt.treeverify.selftest --json >"$out/selftest.json" || { cat "$out/selftest.json"; return 1; }
}

attention() {
    use_site
    python3 tests/e2e/tree_attention.py --out "$out/tree_attention.json"
}

serve() {
    use_site
    local port=31000 pids=() mode
    for mode in $(python3 -c 'import sys; sys.path.insert(0, "tests/e2e"); import modes; print(*modes.chosen())'); do
        timeout 420 python3 tests/e2e/serve.py --mode "$mode" --target "$target" --draft "$draft" --out "$outputs" \
            --port $port >"$outputs/serve-$mode.log" 2>&1 &
        pids+=($!)
        port=$((port + 200))
    done
    local failed=0
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    tail -n 40 "$outputs"/serve-*.log >"$out/serve.log"
    tail -n 3 "$outputs"/serve-*.log
    return $failed
}

judge() {
    use_site
    local failed=0
    python3 tests/e2e/replay_trace.py --outputs "$outputs" --out "$out/replay.json" || failed=1
    timeout 420 python3 tests/e2e/judge.py --target "$target" --outputs "$outputs" --out "$out/outputs.json" || failed=1
    return $failed
}

# DDTREE against no speculation and against DFLASH; its sampled tokens against the target's law; its pools' accounting.
proof() {
    use_site
    timeout 470 python3 "tests/e2e/$1.py" --target "$target" --draft "$draft" --work "$outputs/$1" --out "$out/$1.json"
}
lossless() { proof lossless; }
sampling() { proof sampling; }
churn() { proof churn; }

# Exit 4: fewer than two GPUs. NVLink multicast stays off, for NCCL, PyTorch and NVSHMEM.
tp2() {
    use_site
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    export TREEVERIFY_LIBRARY=$site/sglang/srt/treeverify/_kernels/libtreeverify.so
    timeout 470 python3 tests/e2e/two_gpus.py --target "$target" --draft "$draft" --work "$outputs/two_gpus" \
        --out "$out/two_gpus.json"
}

# Exit 3: the budget ended first, run it again.
bench() {
    use_site
    export TREEVERIFY_LIBRARY=$site/sglang/srt/treeverify/_kernels/libtreeverify.so
    python3 scripts/bench_verify.py --out "$out/verify.json" --budget-s "${TV_BUDGET_S:-460}" \
        ${TV_BENCH_STAGES:+--stages "$TV_BENCH_STAGES"}
}

marshal() {
    use_site
    python3 scripts/bench_marshal.py --out "$out/marshal.json"
}

# Exit 3 here too.
kv() {
    use_site
    export TREEVERIFY_LIBRARY=$site/sglang/srt/treeverify/_kernels/libtreeverify.so
    python3 scripts/bench_kv.py --out "$out/kv.json" --budget-s "${TV_BUDGET_S:-460}"
}

# And here; OUT/soak.jsonl and build/gpu/outputs/soak must be there to go on.
soak() {
    use_site
    python3 tests/e2e/soak.py --target "$target" --draft "$draft" --work "$outputs/soak" --out "$out/soak.json" \
        --budget-s "${TV_BUDGET_S:-460}" ${TV_SERVERS:+--servers "$TV_SERVERS"}
}

# And here.
long() {
    use_site
    python3 scripts/bench_long.py --out "$out/long.json" --budget-s "${TV_BUDGET_S:-460}" ${TV_SERVERS:+--servers "$TV_SERVERS"}
}

# And here.
fuzz() {
    use_site
    export TREEVERIFY_LIBRARY=$site/sglang/srt/treeverify/_kernels/libtreeverify.so
    python3 scripts/fuzz_verify.py --out "$out/fuzz.json" --budget-s "${TV_BUDGET_S:-300}" ${TV_SEED:+--seed "$TV_SEED"}
}

# And here.
ddtree() {
    use_site
    python3 scripts/bench_ddtree.py --out "$out/ddtree.json" --target "$target" --draft "$draft" \
        --stages "${TV_STAGES:-acceptance,speed}" --budget-s "${TV_BUDGET_S:-460}"
}

case $stage in
setup | attention | serve | judge | lossless | sampling | churn | bench | kv | marshal | ddtree | tp2 | soak | long | fuzz) "$stage" ;;
all) for each in setup attention serve judge; do "$each"; done ;;
*) sed -n 's/^# *STAGE: /stages: /p' "$0" >&2 && exit 2 ;;
esac
