"""The notebook: committed with the outputs of a whole run, small, and its code runs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "docs/notebooks/quickstart.ipynb"


@pytest.fixture(scope="module")
def cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_of_one_run_from_top_to_bottom(cells):
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "error" not in kinds and kinds.count("display_data") == 2
    assert "are identical" in cells[-1]["outputs"][0]["text"][-1]
    assert NOTEBOOK.stat().st_size < 120_000


@pytest.mark.full
def test_code_runs(cells):
    pytest.importorskip("matplotlib")
    program = "\n".join("".join(cell["source"]) for cell in cells)
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("are identical")
