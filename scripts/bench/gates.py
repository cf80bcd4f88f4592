# SPDX-License-Identifier: Apache-2.0
"""What the rows add up to: ratios to the peers, growth along each axis, and the goals with whether they are met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .jobs import EVEN, FP8, PLANNED, UNEVEN
from .shapes import BASELINES, GROWTH, MORE, POOL_SHAPES, POOLS, RAGGED, Shape
from .store import Row

Find = Callable[..., "Row | None"]
MIB = 1 << 20
LONG = 200_000
"""KV tokens of a batch from which on the roofline must bind."""


def finder(rows: Iterable[Row]) -> Find:
    """A look-up of the timed row of an implementation and shape: find(impl, shape, slots=, batch=, pool=)."""
    index = {_at(row["impl"], Shape(row["bs"], row["heads"], row["n"], row["kv"]), row["slots"], row["batch"],
                 row["pool"]): row for row in rows if "us" in row}  # fmt: skip

    def find(
        impl: str, shape: Shape, slots: str | None = None, batch: str = EVEN, pool: int | None = None
    ) -> Row | None:
        usual = "paged" if impl == "flashmla" else "random"
        return index.get(_at(impl, shape, slots or usual, batch, pool))

    return find


def _at(*what: object) -> tuple[object, ...]:
    return what


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; nan of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(find: Find, path: str, peer: str, shapes: Sequence[Shape]) -> list[float]:
    """Our time over the peer's, at each shape that both have."""
    pairs = ((find(path, shape), find(peer, shape)) for shape in shapes)
    return [ours["us"] / theirs["us"] for ours, theirs in pairs if ours and theirs]


def table(find: Find, paths: Sequence[str], peers: Sequence[str]) -> list[Row]:
    """One row a shape that peers were timed on: microseconds of all, ours over theirs, roofline."""
    result = []
    for shape in BASELINES + MORE:
        row: Row = shape._asdict()
        for impl in (*paths, *peers):
            if found := find(impl, shape):
                row[impl] = found["us"]
        for path in paths:
            if ours := find(path, shape):
                row[f"{path}_nsplit"], row[f"{path}_roofline"] = ours.get("nsplit"), ours.get("roofline")
                row |= {f"{path}/{peer}": round(row[path] / row[peer], 3) for peer in peers if peer in row}
            if packed := find(path, shape, slots="contiguous"):
                row[f"{path}_contiguous"] = packed["us"]
        if len(row) > len(shape):
            result.append(row)
    return result


def means(find: Find, paths: Sequence[str], peers: Sequence[str]) -> list[Row]:
    """Geometric means of our time over each peer's, over the baselines both have."""
    found = [(path, peer, ratios(find, path, peer, BASELINES)) for path in paths for peer in peers]
    return [{"path": path, "peer": peer, "shapes": len(values), "mean": round(geomean(values), 3)}
            for path, peer, values in found if values]  # fmt: skip


def growth(find: Find, paths: Sequence[str]) -> list[Row]:
    """Time along each axis, and how far the time of the upper half lies from a straight line through its ends."""
    result = []
    for path in paths:
        for axis, line in GROWTH.items():
            points = [(getattr(shape, axis), row["us"]) for shape in line if (row := find(path, shape))]
            if len(points) >= 3:
                result.append({"path": path, "axis": axis, "base": "BS {} heads {} n {} kv {}".format(*line[0]),
                               "points": points, "bend": round(bend(points), 3)})  # fmt: skip
        for shape in POOL_SHAPES:
            sizes = [find(path, shape, pool=pool) for pool in POOLS]
            if all(sizes):
                points = [(pool, row["us"]) for pool, row in zip(POOLS, sizes, strict=True) if row]
                result.append({"path": path, "axis": "pool", "base": str(shape), "points": points,
                               "bend": round(points[-1][1] / points[0][1] - 1, 3)})  # fmt: skip
    return result


def bend(points: Sequence[tuple[float, float]]) -> float:
    """How much faster than in proportion to x the time grows, at worst, from one point to any later one.

    0 or less: nowhere more than linear. A launch floor makes the early growth less than linear, never more.
    """
    worst = -math.inf
    for i, (x0, t0) in enumerate(points):
        worst = max([worst, *((t1 / t0) / (x1 / x0) - 1 for x1, t1 in points[i + 1 :])])
    return worst


def _gate(name: str, goal: str, got: float | None, met: bool | None) -> Row:
    value = None if got is None or math.isnan(got) else float(f"{got:.4g}")
    return {"gate": name, "goal": goal, "got": value, "met": met if value is not None else None}


def _most(name: str, limit: float, values: Sequence[float], of: Callable[[Sequence[float]], float], want: int) -> Row:
    """A gate on a maximum; open while measurements are missing."""
    got = of(values) if values else None
    whole = len(values) == want
    note = f"<= {limit:g}" + ("" if whole else f" ({len(values)} of {want} measured)")
    return _gate(name, note, got, got is not None and got <= limit if whole else None)


def gates(rows: Sequence[Row], find: Find, largest_workspace: Mapping[str, int]) -> Iterator[Row]:
    """The goals of the paths. `met` is None while measurements are missing.

    Args:
        largest_workspace: of each path, bytes of the bucket that needs most.
    """
    paths = list(largest_workspace)
    yield from _speed_gates(find)
    for path, limit in (("portable", 0.5), ("narrow", 0.5), ("hopper", 0.75)):
        if path in paths:
            yield from _roofline_gates(rows, path, limit)
    for path in paths:
        if path.endswith(FP8):
            yield from _fp8_gates(rows, find, path)
        yield from _path_gates(rows, find, path)
        most = [largest_workspace[path] / MIB]
        yield _most(f"{path}: MiB of workspace, largest of all buckets", 256, most, max, 1)


def _fp8_gates(rows: Sequence[Row], find: Find, path: str) -> Iterator[Row]:
    """A path on an fp8 pool against itself on a bf16 one, at the shapes that both were timed on."""
    plain = path.removesuffix(FP8)
    timed = {Shape(row["bs"], row["heads"], row["n"], row["kv"]) for row in rows if row["impl"] == path}
    both = sorted(shape for shape in timed if find(path, shape) and find(plain, shape))
    bound = [shape for shape in both if shape.heads == 8 and shape.n <= 4 and shape.kv >= 128_000]
    rest = [shape for shape in both if shape not in bound]
    where = "few rows, long context"
    gains = ratios(find, plain, path, bound)
    lowest = min(gains, default=None)
    met = lowest >= 1.4 if lowest is not None else None
    yield _gate(f"{plain} / {path}, lowest of {len(bound)} shapes of {where}", ">= 1.4", lowest, met)
    over = ratios(find, path, plain, rest)
    yield _most(f"{path} / {plain}, worst of {len(rest)} other shapes", 1.2, over, max, max(len(rest), 1))


def _speed_gates(find: Find) -> Iterator[Row]:
    count = len(BASELINES)
    fa2 = ratios(find, "portable", "fa2", BASELINES)
    yield _most("portable / fa2, geometric mean of the baselines", 0.6, fa2, geomean, count)
    yield _most("portable / fa2, worst baseline", 0.8, fa2, max, count)
    narrow = ratios(find, "narrow", "fa2", BASELINES)
    yield _most("narrow / fa2, geometric mean of the baselines", 0.6, narrow, geomean, count)
    flashmla = ratios(find, "hopper", "flashmla", BASELINES)
    yield _most("hopper / FlashMLA, worst baseline", 1.0, flashmla, max, count)
    few = [shape for shape in BASELINES if shape.heads == 8]
    at_few = ratios(find, "hopper", "flashmla", few)
    yield _most("hopper / FlashMLA, geometric mean at 8 heads", 0.75, at_few, geomean, len(few))
    cascade = ratios(find, "hopper", "fa3_cascade", BASELINES)
    yield _most("hopper / FA3 cascade, geometric mean of the baselines", 0.55, cascade, geomean, count)


def _roofline_gates(rows: Sequence[Row], path: str, limit: float) -> Iterator[Row]:
    long = [row for row in rows if row["impl"] == path and row["batch"] == EVEN and row["slots"] == "random"
            and row["pool"] is None and row["bs"] * row["kv"] >= LONG and "roofline" in row]  # fmt: skip
    shapes = {shape for shape in BASELINES if shape.bs * shape.kv >= LONG}
    at = [row["roofline"] for row in long if Shape(row["bs"], row["heads"], row["n"], row["kv"]) in shapes]
    whole = len(at) == len(shapes)
    note = "" if whole else f" ({len(at)} of {len(shapes)} measured)"
    lowest = min(at, default=None)
    met = lowest >= limit if whole and lowest is not None else None
    yield _gate(f"{path}: roofline, lowest baseline of >= {LONG} KV tokens", f">= {limit:g}{note}", lowest, met)
    share = sum(row["roofline"] >= limit for row in long) / len(long) if long else None
    goal = f"1 (at least {limit:g} at each of {len(long)} shapes)"
    yield _gate(f"{path}: share of all shapes of >= {LONG} KV tokens at that roofline", goal, share, share == 1)


def _path_gates(rows: Sequence[Row], find: Find, path: str) -> Iterator[Row]:
    short = find(path, Shape(1, 8, 9, 1024))
    yield _most(f"{path}: us at 1k, batch 1", 12, [short["us"]] if short else [], max, 1)
    for heads in (8, 64):
        uneven = Shape(len(RAGGED), heads, 9, max(RAGGED))
        alone = find(path, uneven._replace(bs=1))
        for batch, limit in ((UNEVEN, math.inf), (PLANNED, 1.15)):
            together = find(path, uneven, batch=batch)
            over = [together["us"] / alone["us"]] if together and alone else []
            if limit < math.inf or over:
                yield _most(f"{path}: {batch} batch / its longest member alone, {heads} heads", limit, over, max, 1)
    ours = [row for row in rows if row["impl"] == path and "workspace_bytes" in row]
    at = [row["workspace_bytes"] / MIB for row in ours if (row["bs"], row["heads"], row["n"]) == (8, 64, 9)]
    yield _most(f"{path}: MiB of workspace at batch 8, 64 heads, n 9", 64, [max(at)] if at else [], max, 1)
    for line in growth(find, [path]):
        limit = 0.05 if line["axis"] == "pool" else 0.1
        name = f"{path}: growth with {line['axis']} beyond linear" if line["axis"] != "pool" else (
            f"{path}: growth with the pool, 8 times the size, {line['base']}")  # fmt: skip
        yield _most(name, limit, [line["bend"]], max, 1)
    wrong = [row for row in rows if row["impl"] == path and row.get("wrong")]
    checked = [row for row in rows if row["impl"] == path and "error" in row]
    yield _most(f"{path}: wrong outputs of {len(checked)} checked", 0, [float(len(wrong))] if checked else [], max, 1)


def table_text(rows: Sequence[Row], impls: Sequence[str]) -> str:
    """table() in columns: microseconds, ours with the per cent of the roofline."""

    def cell(row: Row, impl: str) -> str:
        share = row.get(f"{impl}_roofline")
        return f"{row[impl]:.1f}" + (f" {share:.0%}" if share else "") if impl in row else "-"

    lines = ["bs heads n kv".split() + list(impls)]
    lines += [[str(row[name]) for name in Shape._fields] + [cell(row, impl) for impl in impls] for row in rows]
    return "\n".join(" ".join(f"{field:>11}" for field in line) for line in lines)


def text(rows: Sequence[Row]) -> str:
    """The gates, a line each."""
    mark: dict[Any, str] = {True: "met ", False: "NOT ", None: "open"}
    return "\n".join(f"{mark[row['met']]} {row['gate']}: {row['got']} (goal {row['goal']})" for row in rows)
