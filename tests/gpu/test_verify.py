# SPDX-License-Identifier: Apache-2.0
"""mla_verify on the GPU against the float64 reference: odd sizes, every layout, random trees, poisoned buffers.

Every test runs on each path the card has; what `check` checks, with and without a plan.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from treeverify.attention import abi, cases, paths, plan, reference

pytestmark = pytest.mark.gpu
LIMIT = 5e-3
POOLS = [torch.bfloat16, torch.float16, *paths.FP8]
"""What the KV pool holds."""
FEW_POOLS = [torch.bfloat16, torch.float8_e4m3fn]


def planned(case: cases.Case) -> cases.Case:
    """The same step with more splits than requests, shared out by mla_plan; at most 256 MiB of partial results."""
    one = 4 * plan.workspace_floats(0, case.n, case.q_nope.shape[1], 1)
    return dataclasses.replace(case, splits=case.bs + min(66, 2**28 // one))


def check(case: cases.Case) -> None:
    expected = case.expected()
    for step in (case, planned(case)):
        step.poison()
        assert reference.worst_row_error(step.run(), expected) <= LIMIT, f"{step.splits} planned splits"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 255, 256])
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 16, 40, 64, 128])
@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_widths_and_heads(make_case, heads, n, kv_dtype):
    check(make_case([0, 1, 70], n, heads, seed=n * 131 + heads, kv=kv_dtype))


@pytest.mark.parametrize(
    "kv", [0, 1, 11, 31, 32, 33, 63, 64, 65, 127, 1000, 1024, 4095, 4097, 8736, 32768, 200_000, 262_144 + 9]
)
@pytest.mark.parametrize(("heads", "n"), [(8, 9), (16, 1), (5, 7)])
@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_context_lengths(make_case, kv, heads, n, kv_dtype):
    check(make_case([kv], n, heads, seed=kv, kv=kv_dtype))


@pytest.mark.parametrize("kv_dtype", POOLS)
@pytest.mark.parametrize("kv", [9, 63, 64, 65, 127, 128, 129, 191, 193, 1000, 4992, 33_000])
@pytest.mark.parametrize(("heads", "n"), [(8, 8), (16, 8), (64, 9), (40, 5)])
def test_many_rows(make_case, heads, n, kv, kv_dtype):
    """One to nine whole blocks of 64 query rows, and a partial one; whole tiles of KV and partial ones."""
    check(make_case([kv - n], n, heads, seed=kv, kv=kv_dtype))
    check(make_case([kv - n, 70, 0], n, heads, seed=kv, kv=kv_dtype, nsplit=3))
    check(make_case([kv - n, 70, 0], n, heads, seed=kv, kv=kv_dtype, nsplit=4, taper=3))


@pytest.mark.parametrize("kv_dtype", POOLS)
@pytest.mark.parametrize("qo_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("two_source", [False, True])
def test_layouts_and_index_widths(make_case, two_source, index_dtype, qo_dtype, kv_dtype):
    check(
        make_case([130, 0, 777], 9, 8, kv=kv_dtype, two_source=two_source, index_dtype=index_dtype, qo_dtype=qo_dtype)
    )


@pytest.mark.parametrize("two_source", [False, True])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("kind", [abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN])
@pytest.mark.parametrize("n", [1, 9, 33, 64, 65, 130])
def test_mask_forms(make_case, n, kind, mask_dtype, two_source):
    check(make_case([0, 5, 300, 31], n, 4, mask_kind=kind, mask_dtype=mask_dtype, two_source=two_source, seed=n))


@pytest.mark.parametrize("nsplit", [1, 2, 3, 7, 66, 132, 255, 256])
@pytest.mark.parametrize("kv", [0, 40, 2000, 20_000])
def test_split_counts(make_case, nsplit, kv):
    check(make_case([kv, kv // 3, 5], 9, 8, nsplit=nsplit, seed=nsplit))


@pytest.mark.parametrize("cut", [(2, 1), (4, 1), (4, 3), (9, 8), (40, 4)])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("kv", [0, 40, 300, 2000, 20_000])
def test_halved_splits(make_case, kv, heads, cut):
    check(make_case([kv, kv // 3, 5], 9, heads, nsplit=cut[0], taper=cut[1], padded=1, extra_tokens=2, seed=kv))


@pytest.mark.parametrize("nsplit", [1, 8])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_every_row_is_written(make_case, kv_dtype, heads, nsplit):
    case = make_case([100, 3], 9, heads, padded=3, extra_tokens=13, nsplit=nsplit, kv=kv_dtype)
    check(case)
    assert torch.equal(case.out[2 * 9 :], torch.zeros_like(case.out[2 * 9 :]))


@pytest.mark.parametrize("nsplit", [1, 8])
@pytest.mark.parametrize("widths", [[9, 9, 9], [3, 0, 9], [0, 0, 1], [0, 0, 0]])
def test_draft_widths_may_differ(make_case, widths, nsplit):
    n, prefixes = 9, [100, 0, 333]
    case = make_case(prefixes, n, 8, nsplit=nsplit)
    spans = [p + w for p, w in zip(prefixes, widths, strict=True)]
    case.qo_indptr = torch.tensor([0, *widths], device="cuda").cumsum(0)
    case.kv_indptr = torch.tensor([0, *spans], device="cuda").cumsum(0).int()
    check(case)
    assert not case.out[sum(widths) :].any()


@pytest.mark.parametrize("nsplit", [1, 8])
def test_more_draft_rows_than_tokens_write_nothing_behind_out(make_case, nsplit):
    case = make_case([100, 50], 9, 8, nsplit=nsplit)
    whole = torch.full((18, 8, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    expected = case.expected()
    case.q_nope, case.q_pe, case.out = case.q_nope[:12], case.q_pe[:12], whole[:12]
    assert reference.worst_row_error(case.run(), expected[:12]) <= LIMIT
    assert whole[12:].isnan().all()


@pytest.mark.parametrize("kv_dtype", POOLS)
@pytest.mark.parametrize("heads", [8, 64])
def test_logit_cap(make_case, heads, kv_dtype):
    check(make_case([500], 9, heads, logit_cap=0.7, kv=kv_dtype))


def test_a_row_that_sees_nothing_is_zero(make_case):
    case = make_case([0], 4, 8, nsplit=4)
    case.visible[0, 2] = False
    case.mask = reference.pack_mask(case.visible)
    check(case)
    assert not case.out[2].any()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *paths.FP8])
@pytest.mark.parametrize("heads", [8, 64])
def test_large_scores_do_not_overflow(make_case, heads, kv_dtype):
    case = make_case([3000], 9, heads, kv=kv_dtype)
    case.q_nope.mul_(30)
    check(case)


@pytest.mark.parametrize("size", [2.0**-60, 2.0**20, 2.0**90])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_queries_of_any_size_on_an_fp8_pool(make_case, heads, size):
    """What bf16 holds and fp16, which such a pool is multiplied as, does not."""
    case = make_case([3000], 9, heads, kv=torch.float8_e4m3fn)
    case.q_nope, case.q_pe, case.sm_scale = case.q_nope * size, case.q_pe * size, case.sm_scale / size
    check(case)


@pytest.mark.parametrize("wild", [float("inf"), float("nan")])
@pytest.mark.parametrize("kv_dtype", POOLS)
@pytest.mark.parametrize("heads", [3, 8, 64])
def test_a_row_of_wild_queries_spoils_no_other(make_case, heads, kv_dtype, wild):
    case = make_case([500], 9, heads, kv=kv_dtype)
    expected, spoilt = case.expected(), torch.zeros(9, heads, dtype=torch.bool, device="cuda")
    case.q_nope[2, 1, 300] = wild
    spoilt[2, 1] = True
    for step in (case, planned(case)):
        step.poison()
        out = step.run()
        assert out[spoilt].isnan().all()
        assert reference.worst_row_error(out[~spoilt], expected[~spoilt]) <= LIMIT


@pytest.mark.parametrize("kv_dtype", paths.FP8)
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_every_byte_of_an_fp8_pool_means_what_it_does_to_torch(make_case, heads, kv_dtype):
    """Those of one position each, which all rows see alone, infinities and NaN among them, come out as they are."""
    case = make_case([0], 1, heads, kv=kv_dtype, nsplit=1)
    case.k_scale = 1.0
    codes = torch.arange(512, device="cuda") % 256
    case.pool.view(torch.uint8)[case.kv_indices.long(), 0, :512] = codes.to(torch.uint8)
    case.q_nope.zero_()
    case.q_pe.zero_()
    expected = codes.to(torch.uint8).view(kv_dtype).float()
    wild = ~expected.isfinite()
    case.pool.view(torch.uint8)[case.kv_indices.long(), 0, :512] = torch.where(wild, 0, codes).to(torch.uint8)
    assert torch.equal(case.run()[0], expected.where(~wild, 0).bfloat16().expand(heads, -1))
    case.pool.view(torch.uint8)[case.kv_indices.long(), 0, 300] = 0x7F  # NaN in both: of a key, so of all there is
    assert case.run().isnan().all()


@pytest.mark.parametrize("nsplit", [1, 5])
def test_a_dropped_mask_fails_the_same_check(make_case, nsplit):
    """Negative control: with the mask left out, the comparison that passes everywhere else must fail."""
    case = make_case([64, 700], 16, 8, nsplit=nsplit)
    check(case)
    expected = case.expected()
    case.mask_kind = abi.MASK_NONE
    assert reference.worst_row_error(case.run(), expected) > 10 * LIMIT


@pytest.mark.parametrize("kind", [abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN])
@pytest.mark.parametrize("nsplit", [1, 4])
def test_flipping_one_bit_changes_exactly_its_row(make_case, kind, nsplit):
    n, heads, prefixes = 17, 8, [31, 500]
    case = make_case(prefixes, n, heads, mask_kind=kind, nsplit=nsplit)
    before = case.run().clone()
    assert case.mask is not None
    for b, i, j in [(0, 5, 2), (1, 16, 16), (1, 0, 9)]:
        flat = case.mask.view(-1)
        if kind == abi.MASK_PACKED:
            flat[b * n + i] ^= 1 << j
        else:
            start = int(case.mask_indptr[b]) if case.mask_indptr is not None else 0
            at = start + (i * (prefixes[b] + n) + prefixes[b] + j if kind == abi.MASK_FULL else i * n + j)
            flat[at] = ~flat[at]
        after = case.run().clone()
        changed = (after != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [b * n + i]
        before = after


@pytest.mark.parametrize(
    ("prefixes", "n", "heads"), [([1024], 9, 8), ([200_000], 9, 8), ([5, 3000, 77, 1], 33, 16), ([300] * 8, 64, 64)]
)
@pytest.mark.parametrize("plan_on", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *paths.FP8])
def test_replays_and_eager_give_the_same_bits(make_case, kv_dtype, plan_on, prefixes, n, heads):
    case = make_case(prefixes, n, heads, plan=plan_on, kv=kv_dtype)
    eager = case.run().clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for _ in range(5):
        case.poison()
        graph.replay()
        assert torch.equal(case.out, eager)


def test_a_captured_plan_follows_the_lengths(make_case):
    """The long request of the captured batch is the short one of the replay."""
    n, heads = 9, 8
    case = make_case([9_000, 40, 40], n, heads, plan=True)
    other = make_case([40, 40, 9_000], n, heads, plan=True, seed=1)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for name in ("q_nope", "q_pe", "pool", "kv_indptr", "kv_indices", "mask"):
        getattr(case, name).copy_(getattr(other, name))
    case.poison()
    graph.replay()
    assert reference.worst_row_error(case.out, other.expected()) <= LIMIT
    assert case.split_indptr is not None
    assert case.split_indptr.tolist() == plan.planned(other.kv_lens, case.splits)
    assert plan.share_splits(other.kv_lens, case.splits)[2] > 8


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("cut", [plan.Cut(8), plan.Cut(4, 3)])
@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_neighbours_and_padding_change_no_bit(make_case, kv_dtype, cut, heads):
    n, split = 9, {"nsplit": cut.splits, "taper": cut.taper, "kv": kv_dtype}
    alone = make_case([777], n, heads, seed=3, **split)
    crowd = make_case([777, 5, 12_000], n, heads, padded=4, extra_tokens=5, seed=4, **split)
    pool = torch.cat([alone.pool, crowd.pool])
    crowd.kv_indices += alone.pool.shape[0]
    crowd.kv_indices[: 777 + n] = alone.kv_indices
    crowd.pool, crowd.mask[0] = pool, alone.mask[0]
    crowd.q_nope[:n], crowd.q_pe[:n] = alone.q_nope, alone.q_pe
    assert torch.equal(alone.run(), crowd.run()[:n])


@pytest.mark.parametrize("prefixes", [[200_000] + [1_000] * 7, [1, 0, 30_000, 5, 128]])
def test_ragged_batches(make_case, prefixes):
    check(make_case(prefixes, 9, 8, plan=True))


@pytest.mark.parametrize("seed", range(40))
def test_random_choices(seed):
    """Any path the card has, any layout and mask form, planned or not, splits as chosen or not."""
    draw = random.Random(seed)
    pool = draw.choice(POOLS)
    target = draw.choice(paths.testable(torch.device("cuda"), pool))
    n, heads = draw.choice([1, 2, 5, 8, 9, 16, 31, 64, 65, 130]), draw.choice([1, 3, 8, 16, 40, 64])
    prefixes = [draw.choice([0, 1, 63, 64, 65, 700, draw.randrange(9_000)]) for _ in range(draw.randint(1, 6))]
    two_source = draw.random() < 0.5
    case = cases.make_case(
        prefixes,
        n,
        heads,
        **cases.pool_of(pool),
        seed=seed,
        mask_kind=draw.randint(abi.MASK_NONE, abi.MASK_QLEN),
        two_source=two_source,
        index_dtype=draw.choice([torch.int32, torch.int64]),
        nsplit=draw.choice([None, None, 1, draw.randint(2, 40)]),
        path=draw.choice([target.path, abi.PATH_AUTO]),
        plan=draw.random() < 0.5,
        padded=0 if two_source else draw.randrange(3),
        extra_tokens=draw.randrange(4),
        logit_cap=draw.choice([0.0, 0.0, 5.0]),
    )
    check(case)


@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_pool_beyond_two_to_the_31_elements(make_case, kv_dtype):
    slots = 2**32 // plan.KEY_DIM + 1000  # 8.6 GB in bf16
    if torch.cuda.mem_get_info()[0] < slots * plan.KEY_DIM * 3 * 1.1:
        pytest.skip("needs 15 GB of free GPU memory")
    pool = torch.empty(slots, 1, plan.KEY_DIM, dtype=torch.bfloat16, device="cuda").normal_().to(kv_dtype)
    case = make_case([3000], 9, 8, pool=pool, kv=kv_dtype)
    assert int(case.kv_indices.max()) * plan.KEY_DIM > 2**31
    check(case)


@pytest.mark.parametrize("kv_dtype", FEW_POOLS)
def test_strides_are_arguments(make_case, kv_dtype):
    case = make_case([100, 200], 9, 8, kv=kv_dtype)
    case.pool = torch.nn.functional.pad(case.pool.float(), (0, 64), value=float("nan")).to(kv_dtype)[..., :576]
    tokens = case.q_nope.shape[0]
    wide_q = torch.randn(tokens, 8, 600, device="cuda").to(torch.bfloat16)
    wide_out = torch.full((tokens, 8, 520), float("nan"), dtype=torch.bfloat16, device="cuda")
    case.q_nope, case.q_pe, case.out = wide_q[..., :512], wide_q[..., 512:576], wide_out[..., :512]
    check(case)
    assert wide_out[..., 512:].isnan().all(), "nothing is written outside the rows"


@pytest.mark.parametrize("odd", ["q", "out", "kv", "fp8", "workspace"])
def test_misaligned_views_are_refused(make_case, odd):
    case = make_case([100], 3, 2)
    if odd == "q":
        case.q_nope = torch.zeros(3, 2, 513, dtype=torch.bfloat16, device="cuda")[..., 1:]
    elif odd == "workspace":
        case = make_case([100], 3, 2, nsplit=2)
        case.workspace = torch.empty(case.workspace.numel() + 1, device="cuda")[1:]
    elif odd == "out":
        case.out = torch.zeros(3, 2, 514, dtype=torch.bfloat16, device="cuda")[..., 2:]
    elif odd == "fp8":
        case.pool = torch.zeros(120, 1, 584, device="cuda").to(torch.float8_e4m3fn)[..., :576]
    else:
        case.pool = torch.zeros(120, 1, 580, dtype=torch.bfloat16, device="cuda")[..., :576]
    with pytest.raises(ValueError, match=r"treeverify: .*aligned"):
        case.run()


def test_half_aligned_q_goes_to_the_portable_path():
    """4-byte alignment is enough there; the Hopper path says no, and AUTO knows."""
    case = cases.make_case([100, 3], 9, 8, nsplit=3, path=abi.PATH_PORTABLE)
    wide = torch.zeros(18, 8, 514, dtype=torch.bfloat16, device="cuda")
    wide[..., 2:] = case.q_nope
    case.q_nope = wide[..., 2:]
    check(case)
    portable = case.run().clone()
    case.path = abi.PATH_AUTO
    assert torch.equal(case.run(), portable)
    case.path = abi.PATH_HOPPER
    with pytest.raises(ValueError, match="Hopper path needs q 16-byte aligned"):
        case.run()


def test_a_path_the_card_has_not_is_refused():
    if torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("a Hopper card has every path")
    case = cases.make_case([100], 3, 2)
    case.path = abi.PATH_HOPPER
    with pytest.raises(RuntimeError, match="mla_verify failed"):
        case.run()
