# SPDX-License-Identifier: Apache-2.0
"""Rows on disk: kept at once, not measured twice, none lost to a run that was cut off."""

from __future__ import annotations

import json

from bench.store import Store, key, rounded

ROW = {"impl": "portable", "bs": 1, "heads": 8, "n": 9, "kv": 1024, "slots": "random", "batch": "even", "pool": None,
       "card": "a card", "build": "0123"}  # fmt: skip


def test_a_measured_row_is_there_for_the_next_run(tmp_path):
    report = tmp_path / "new folder" / "verify.json"
    Store(report).add({**ROW, "us": 12.5})
    store = Store(report)
    assert store.done(ROW)
    assert list(store.rows.values()) == [{**ROW, "us": 12.5}]


def test_other_builds_cards_and_layouts_are_other_measurements(tmp_path):
    store = Store(tmp_path / "verify.json")
    store.add({**ROW, "us": 12.5})
    for field, value in {"build": "4567", "card": "another", "slots": "contiguous", "pool": 8, "kv": 2048}.items():
        assert not store.done({**ROW, field: value}), field


def test_what_failed_is_tried_again_and_what_was_too_slow_is_not(tmp_path):
    store = Store(tmp_path / "verify.json")
    store.add({**ROW, "failed": "no such kernel"})
    store.add({**ROW, "kv": 200_000, "skipped": "one run takes 900 ms"})
    assert not store.done(ROW)
    assert store.done({**ROW, "kv": 200_000})
    store.add({**ROW, "us": 3.0})
    again = Store(store.report)
    assert again.done(ROW)
    assert "failed" not in again.rows[key(ROW)]


def test_a_row_cut_off_in_the_middle_is_dropped_and_written_over(tmp_path):
    store = Store(tmp_path / "verify.json")
    store.add({**ROW, "us": 12.5})
    with store.journal.open("a") as file:
        file.write('{"impl": "portable", "bs": 2, "he')
    again = Store(store.report)
    assert [row["bs"] for row in again.rows.values()] == [1]
    again.add({**ROW, "bs": 4, "us": 30.0})
    assert [json.loads(line)["bs"] for line in store.journal.read_text().splitlines()] == [1, 4]


def test_the_report_is_json_with_sections_before_rows(tmp_path):
    store = Store(tmp_path / "verify.json")
    store.add({**ROW, "us": 12.5})
    store.write_report({"card": "a card"}, store.rows.values(), gates=[{"gate": "fast", "met": True}])
    report = json.loads(store.report.read_text())
    assert list(report) == ["card", "gates", "rows"]
    assert report["rows"] == [{**ROW, "us": 12.5}]
    assert not list(tmp_path.glob("*.part"))


def test_a_report_without_rows_is_json_too(tmp_path):
    store = Store(tmp_path / "verify.json")
    store.write_report({"card": "a card"}, [])
    assert json.loads(store.report.read_text())["rows"] == []


def test_rounding_keeps_five_digits_and_what_is_no_float():
    row = {"us": 123456.789, "error": 0.00123456789, "bs": 123456789, "slots": "random", "roofline": float("inf")}
    short = {"us": 123460.0, "error": 0.0012346, "bs": 123456789, "slots": "random", "roofline": None}
    assert rounded(row) == short
