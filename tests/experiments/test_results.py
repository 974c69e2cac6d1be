"""The results page: up to date with the measured files, and able to show a file of a bench it does not know."""

import json

import pytest

from experiments import results
from kdjax.errors import KdjaxError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / results.NANO).write_text((results.DOCS / "results" / results.NANO).read_text())
    return tmp_path


def test_page_is_what_the_files_say():
    assert results.page() == (results.DOCS / "results.md").read_text(), "run python -m experiments.results"


def test_a_new_file_is_shown_without_code_for_it(folder):
    rows = [{"rows": 8, "ms": 1.5, "config": {"tile": 3}}, {"rows": 16, "note": "cut short"}]
    (folder / "novel_h200.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    text = results.page(folder)
    assert "### novel h200" in text and "| rows | ms | note |" in text
    assert "| 8 | 1.5 | - |" in text and "| 16 | - | cut short |" in text and "tile" not in text


def test_figures_of_a_known_bench_stand_in_its_columns(folder):
    row = {"streams": 1, "budget": 31, "us": 91.35, "median_us": 105.29, "equal_to_reference": "12 of 12"}
    (folder / "tree_build_laptop.json").write_text(json.dumps({"device": "a laptop", "rows": [row]}))
    text = results.page(folder)
    assert "### Building draft trees, a laptop" in text and "| 1 | 31 | 91.3 | 105 | 12 of 12 |" in text
    assert "kdjax bench tree --out docs/results/tree_build_laptop.json" in text


def test_runs_are_taken_in_with_their_load_and_without_paths(folder, tmp_path):
    run = tmp_path / "runs" / "calibration"
    run.mkdir(parents=True)
    summary = {
        "experiment": "calibration",
        "claim": "figure 1",
        "metrics": {"tau": {"definition": "tokens per pass"}},
        "cells": {"all": {"tau": {"value": 3.25, "low": 3.0, "high": 3.5, "n": 8}}},
        "failed": {},
        "findings": ["it works"],
    }
    provenance = {
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "versions": {"jax": "1.2"},
        "devices": ["cpu:cpu"],
        "backend": "xla",
        "command": ["somebody/kdjax"],
        "checkpoints": {"target": {"path": "somebody/nano", "fingerprint": "abc"}},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "provenance.json").write_text(json.dumps(provenance))
    results.take(tmp_path / "runs", "an idle laptop", folder)
    text = results.page(folder)
    assert "| all | 3.25 [3, 3.5] |" in text and "- it works" in text and "- `tau`: tokens per pass" in text
    assert "cpu:cpu, jax 1.2, revision 0123456789 with changes. an idle laptop" in text
    assert "somebody" not in (folder / "experiments" / "calibration.json").read_text()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(KdjaxError, match="holds no finished run"):
        results.take(tmp_path, "")
