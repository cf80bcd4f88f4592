# SPDX-License-Identifier: Apache-2.0
"""The page of results: made of the reports, of all of them, and what is committed is what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import results_page
from bench import page
from bench.long import SERVERS

RESULTS = Path(__file__).resolve().parents[2] / "results"
RECORDED = sorted(path for path in RESULTS.iterdir() if path.is_dir())
WHERE = {"card": "NVIDIA H200", "commit": "abc"}


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_committed_pages_are_what_the_reports_say(folder: Path) -> None:
    assert results_page.main([str(folder), "--check"]) == 0


def test_a_page_that_is_older_than_its_reports_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RESULTS / "h200" / "ddtree", tmp_path / "ddtree")
    assert results_page.main([str(tmp_path)]) == 0 and results_page.main([str(tmp_path), "--check"]) == 0
    report = json.loads((tmp_path / "ddtree" / "outputs.json").read_text())
    report["rows"][0]["tokens_per_step"] = 98.7
    (tmp_path / "ddtree" / "outputs.json").write_text(json.dumps(report))
    assert results_page.main([str(tmp_path), "--check"]) == 1
    assert "is not made of these reports" in capsys.readouterr().err


def test_a_folder_without_reports_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_page.main([str(tmp_path)]) == 1
    assert "reproduce.sh" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_recorded_page_has_the_readme_tables_numbers_and_pictures() -> None:
    text = page.text(RESULTS / "h200")
    assert "| 1 | 8 | 9 | 32768 | 35.6 (24%) | 40.9 (21%) | 35.2 (25%) | 6419.5 |" in text
    for picture in ("verify-latency.png", "verify-roofline.png", "ddtree/speed.png"):
        assert f"({picture})" in text and (RESULTS / "h200" / picture).exists()
    assert "ngram_mask_dropped | wrong, the check's control" in text and "0 of 4608" in text


def test_sections_of_reports_that_are_not_recorded_yet(tmp_path: Path) -> None:
    def write(name: str, **report: object) -> None:
        (tmp_path / name).write_text(json.dumps({**WHERE, **report}))

    goal = {"gate": "g", "goal": ">= 20", "got": None, "met": None}
    write("long.json", rows=[{"server": "ngram", "step_ms": 3.21, "stages_ms": {}}], gates=[goal])
    write("marshal.json", rows=[{"call": "mla_prep", "way": "packed", "median_us": 3.6, "p99_us": 4.0}])
    move = {"what": "move", "rows": 256, "layers": 61, "slots": "random", "us": 17.8, "gbs": 2020.4, "of_copy": 0.746}
    pays = {"kv": 32768, "random_us": 40.3, "contiguous_us": 39.2, "steps_to_pay": 17.9}
    write("kv.json", rows=[move], gates=[{"goal": "g", "found": 1.3, "met": True}], payback=[pays])
    row = {"server": "s", "ok": False}
    waves = {"waves": 60, "complete": 5500, "batch_sizes": [1, 32], "aborted": 7, "left": 8, "stopped": 9}
    judged = {"judged_tokens": 100, "beyond_margin": 1, "margin": 0.25}
    whole = {"soak": "whole", "seconds": 1300, "requests": 5500, "goal": "x", "ok": True}
    write("soak.json", rows=[{"wave": 1, **row}, {**row, **waves}, {**row, **judged}, whole])
    path = {"path": "hopper", "dtype": "bfloat16", "cases": 9, "worst": 2.5e-3, "tolerance": 5e-3}
    write("fuzz.json", seed=5, cases=20_000, failed=0, rows=[path])
    text = page.text(tmp_path)
    for words in (
        f"| {SERVERS['ngram'].what} | 3.21 |", "Goals that are open: 1.", "| mla_prep | packed | 3.6 | 4.0 |",
        "| 256 | 61 | random | 17.8 | 2020 | 75% |", "* g: 1.3 (met)", "a move pays after 18 steps",
        "s: 60 waves, 5500 requests, batches of 1 to 32", "1 of 100 tokens beyond", "1300 s, 5500 requests (x): ok",
        "Seed 5: 20000 random cases, 0 failed", "| hopper | bfloat16 | 9 | 2.50e-03 | 5e-03 |",
    ):  # fmt: skip
        assert words in text
    assert text.count("**not ok**") == 2 and "wave 1" not in text
