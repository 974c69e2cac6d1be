import json
import pathlib
import subprocess

import msgspec
import pytest

from kdjax.config import GenerateConfig, load
from kdjax.config.generate import RuntimeSection
from kdjax.config.mesh import MeshConfig
from kdjax.errors import KdjaxError
from kdjax.evaluate.agreement import Side
from kdjax.run import RunFolder, provenance, settled
from kdjax.run.ledger import Ledger
from kdjax.run.provenance import HASHED_WHOLE, differences, fingerprint, git_revision


def test_folder_holds_the_resolved_config_and_what_was_measured(tmp_path):
    config = load(GenerateConfig, None, ["decode.budget=7"])
    folder = RunFolder.create(tmp_path / "deep" / "run", config)
    assert load(GenerateConfig, folder.path / "config.toml") == config
    folder.log({"stream": 0})
    folder.log({"stream": 1, "text": "é\n"})
    folder.write("summary.json", {"tau_micro": 2.5})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"stream": 0}, {"stream": 1, "text": "é\n"}]
    (folder.path / "before").hardlink_to(folder.path / "summary.json")
    folder.write("summary.json", {"tau_micro": 3.5})
    # in the place of the file, never into it: a kill leaves the old one or the new one
    assert [json.loads((folder.path / name).read_text())["tau_micro"] for name in ("before", "summary.json")] == [
        2.5,
        3.5,
    ]
    assert not list(folder.path.glob("*.part"))


def test_a_run_is_never_overwritten(tmp_path):
    RunFolder.create(tmp_path, GenerateConfig())
    with pytest.raises(KdjaxError, match="already holds a run: give another folder or remove this one"):
        RunFolder.create(tmp_path, GenerateConfig())
    (tmp_path / "file").touch()
    with pytest.raises(KdjaxError, match="file/run: cannot be written .Not a directory.: make room or give another"):
        RunFolder.create(tmp_path / "file" / "run", GenerateConfig())


def test_a_full_disk_leaves_no_file_that_looks_complete(tmp_path):
    full = pathlib.Path("/dev/full")
    for name in ("config.toml.part", "summary.json.part"):
        (tmp_path / name).symlink_to(full)
    with pytest.raises(KdjaxError, match="config.toml: cannot be written .No space left on device.: make room or give"):
        RunFolder.create(tmp_path, GenerateConfig())
    assert not (tmp_path / "config.toml").exists()
    (tmp_path / "config.toml.part").unlink()
    folder = RunFolder.create(tmp_path, GenerateConfig())
    with pytest.raises(KdjaxError, match="summary.json: cannot be written"):
        folder.write("summary.json", {"tau_micro": 2.5})
    assert folder.read("summary.json") is None
    (tmp_path / "metrics.jsonl").symlink_to(full)
    with pytest.raises(KdjaxError, match="metrics.jsonl: cannot be written"):
        folder.log({"stream": 0})


def test_fingerprint_changes_with_name_and_content(tmp_path):
    file = tmp_path / "config.json"
    seen = set()
    for name, content in (("config.json", b"a"), ("config.json", b"b"), ("other.json", b"b")):
        file.unlink(missing_ok=True)
        file = tmp_path / name
        file.write_bytes(content)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 3


def test_fingerprint_of_a_large_file_reads_its_head_and_size(tmp_path):
    shard = tmp_path / "model.safetensors"
    with shard.open("wb") as file:
        file.truncate(HASHED_WHOLE + 1)
    sparse = fingerprint(tmp_path)
    with shard.open("r+b") as file:
        file.truncate(HASHED_WHOLE + 2)
    longer = fingerprint(tmp_path)
    with shard.open("r+b") as file:
        file.write(b"header")
    assert len({sparse, longer, fingerprint(tmp_path)}) == 3


def test_provenance_is_json_with_versions_devices_and_checkpoints(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    record = json.loads(json.dumps(provenance({"target": tmp_path}, backend="xla")))
    assert record["versions"]["jax"] and record["devices"][0].startswith("cpu:") and record["backend"] == "xla"
    assert len(record["checkpoints"]["target"]["fingerprint"]) == 64


def test_git_revision_tells_a_dirty_tree(tmp_path):
    assert git_revision(tmp_path) is None

    def git(*args):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    file = pathlib.Path(tmp_path / "a.txt")
    file.write_text("1")
    git("add", "a.txt")
    git("commit", "-m", "one")
    clean = git_revision(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and not clean["dirty"]
    file.write_text("2")
    dirty = git_revision(tmp_path)
    assert dirty is not None and dirty["dirty"] and len(dirty["diff_sha256"]) == 64
    file.write_text("3")
    other = git_revision(tmp_path)
    assert other is not None and other["commit"] == dirty["commit"] and other["diff_sha256"] != dirty["diff_sha256"]
    git("add", "a.txt")
    assert git_revision(tmp_path) == other


def test_differences_name_what_a_result_depends_on(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}")
    one = provenance({"target": tmp_path}, "xla", {"prompts": tmp_path / "prompts.jsonl"})
    assert differences(one, {**one, "command": [], "started": "later"}) == []
    moved = {**one, "checkpoints": {"target": {**one["checkpoints"]["target"], "path": "elsewhere"}}}
    assert differences(one, moved) == []
    (tmp_path / "prompts.jsonl").write_text("{ }")
    other = provenance({"target": tmp_path}, "triton", {"prompts": tmp_path / "prompts.jsonl"})
    assert differences(one, other) == ["backend", "checkpoints.target.fingerprint", "files.prompts.sha256"]
    assert differences(one, {**one, "git": None}) != []
    for key in ("python", "versions", "devices"):
        assert differences(one, {**one, key: "another"})


def test_a_folder_is_opened_again_with_the_same_config_only(tmp_path):
    RunFolder.open(tmp_path / "r", "x = 1\n").write("summary.json", {"a": 1})
    assert RunFolder.open(tmp_path / "r", "x = 1\n").read("summary.json") == {"a": 1}
    assert RunFolder(tmp_path / "r").read("absent.json") is None
    with pytest.raises(KdjaxError, match="is of a run with other settings"):
        RunFolder.open(tmp_path / "r", "x = 2\n")
    with pytest.raises(KdjaxError, match="config.toml/deeper: cannot be written"):
        RunFolder.open(tmp_path / "r" / "config.toml" / "deeper", "x = 1\n")


def test_a_folder_without_results_is_left_to_the_corrected_settings(tmp_path):
    failed = RunFolder.open(tmp_path, "x = 1\n")
    failed.log({"cell": "a", "error": "KdjaxError: no"})
    for name in ("summary.json", "provenance.json"):
        failed.write(name, {"cells": []})
    corrected = RunFolder.open(tmp_path, "x = 2\n")
    assert corrected.read("summary.json") is corrected.read("provenance.json") is None
    assert not Ledger(tmp_path / "metrics.jsonl").failures
    corrected.log({"cell": "a", "unit": "u"})
    with pytest.raises(KdjaxError, match="is of a run with other settings"):
        RunFolder.open(tmp_path, "x = 3\n")


def test_what_the_ledger_says_is_on_disk_before_it_says_so(tmp_path, monkeypatch):
    file, synced = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr("os.fsync", lambda _: synced.append({f.name: f.read_bytes() for f in tmp_path.iterdir()}))
    ledger = Ledger(file)
    for change in (
        lambda: ledger.append("b", {"unit": "u", "pair": (1, 2)}),
        lambda: ledger.finish("b"),
        lambda: ledger.add("a", [{"unit": "v", "pair": (3, 4)}]),
        lambda: ledger.fail("c", "no"),
    ):
        change()
        assert synced[-1] == {"metrics.jsonl": file.read_bytes()}
        again = Ledger(file)
        assert (ledger.cells, ledger.unfinished, ledger.failures) == (again.cells, again.unfinished, again.failures)
    before = file.read_bytes()
    ledger.arrange("abc")
    assert synced[-1] == {"metrics.jsonl": before, "metrics.part": file.read_bytes()} and file.read_bytes() != before
    again = Ledger(file)
    assert (ledger.cells, ledger.failures) == (again.cells, again.failures)


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Two sections that choose apart, one of them with a mesh of its own."""

    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = MeshConfig()
    side: Side = Side(backend="xla", mesh=MeshConfig(tensor=2))


def test_what_the_device_chose_is_told_by_key(monkeypatch):
    whole = {"compute_dtype": "float32", "cache_dtype": "float32", "expert_weights": "dequantized"}
    expected = {f"runtime.{key}": value for key, value in whole.items()}
    expected |= {"runtime.backend": "xla", "runtime.layout": "fused"}
    expected |= {f"side.{key}": value for key, value in whole.items()} | {"side.layout": "checkpoint"}
    assert settled.settings([Study()]) == settled.settings([Study(), Study()]) == expected
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    one, other = (RuntimeSection(compute_dtype=dtype, layout="checkpoint") for dtype in ("float32", "bfloat16"))
    side = Side(engine="numpy")
    assert settled.settings([Study(runtime=one, side=side), Study(runtime=other, side=side)]) == {
        "runtime.cache_dtype": ["float32", "bfloat16"],
        "runtime.backend": ["xla", "triton"],
        "runtime.expert_weights": ["dequantized", "packed"],
    }


def test_a_figure_that_is_called_error_is_no_failure(tmp_path):
    records = [{"unit": f"repetition {i}", "error": 1e-3} for i in range(2)]
    ledger = Ledger(tmp_path / "metrics.jsonl")
    ledger.add("kept", records)
    ledger.append("cut", records[0])
    ledger.fail("cut", "RuntimeError: no")
    again = Ledger(tmp_path / "metrics.jsonl")
    assert again.cells == {"kept": records} and again.unfinished == {"cut": records[:1]}
    assert again.failures == {"cut": "RuntimeError: no"}
