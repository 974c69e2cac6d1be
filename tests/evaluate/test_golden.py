"""Golden bundles of a small model, INT4 and dense, made once and checked from then on."""

import json
import os
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kdjax.checkpoint import load_target, synth
from kdjax.checkpoint.bundle import Bundle, Case, write_bundle
from kdjax.checkpoint.files import TensorFolder
from kdjax.cli import main
from kdjax.errors import KdjaxError
from kdjax.evaluate.golden import check, decode_cases
from kdjax.model.int4 import Int4
from kdjax.model.runtime import CPU_EXACT, Runtime
from tests.checkpoint.random_models import DRAFTER, TARGET

DATA = pathlib.Path(__file__).parents[1] / "data"
INT4, DENSE = DATA / "bundle_int4.safetensors", DATA / "bundle_dense.safetensors"
PACKED = Runtime(compute_dtype="float32", cache_dtype="float32")
PROMPTS = ((1, 2, 3, 5, 8, 13, 21, 34), (60, 7, 7, 7, 42))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    synth.write_target(path / "target", TARGET, seed=1)
    synth.write_drafter(path / "drafter", DRAFTER, seed=2)
    return path


def edited(source, path, change):
    """A copy of a bundle whose tensors `change` may alter in place."""
    tensors = load_file(source)
    change(tensors)
    with safe_open(source, framework="np") as file:
        save_file(tensors, path, metadata=file.metadata())
    return path


@pytest.mark.parametrize(("file", "runtime"), [(INT4, PACKED), (DENSE, CPU_EXACT)], ids=["int4", "dense"])
def test_jax_decodes_what_the_reference_decoded(file, runtime):
    results = list(check(Bundle(file), runtime))
    assert [(r.case, r.mode) for r in results] == [(i, mode) for mode in ("autoregressive", "tree") for i in (0, 1)]
    for result in results:
        assert result.passes() and result.tokens == 24, result
    assert any(sum(result.rounds[1:]) for result in results), "no draft is accepted: the case does not test trees"


@pytest.mark.parametrize(("file", "weights"), [(INT4, "stored"), (DENSE, "dense")])
def test_making_them_again_gives_the_same_file(folder, tmp_path, file, weights):
    pair = folder / "target", folder / "drafter"
    cases = list(decode_cases(*pair, PROMPTS, max_new_tokens=24, tree_budget=7))
    write_bundle(tmp_path / "again", *pair, cases, tree_budget=7, weights=weights)
    old, new = load_file(file), load_file(tmp_path / "again")
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_allclose(old[name], new[name], rtol=1e-9 if name.endswith("margins") else 0)
    assert Bundle(file).header == Bundle(tmp_path / "again").header


def test_weights_come_out_as_they_went_in(folder, tmp_path):
    Bundle(INT4).extract(tmp_path)
    for role, prefix in (("target", "language_model."), ("drafter", "")):
        before, after = TensorFolder(folder / role, prefix), TensorFolder(tmp_path / role)
        assert before.tensors.keys() == after.tensors.keys()
        for name in before.tensors:
            np.testing.assert_array_equal(before.read(name), after.read(name))


def test_a_matrix_without_qw_falls_back_to_the_dense_one(tmp_path):
    def layer_1_dense(tensors):
        dense = load_file(DENSE)
        for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
            del tensors[name]
        tensors |= {name: value for name, value in dense.items() if ".layers.1.mlp.experts." in name}

    folder, _ = Bundle(edited(INT4, tmp_path / "mixed", layer_1_dense)).extract(tmp_path)
    layers = load_target(folder, PACKED).params["layers"]
    mixed, packed = (layers[i]["mlp"]["experts"]["up_proj"]["weight"] for i in (1, 2))
    assert isinstance(packed, Int4)
    name = "target.model.layers.1.mlp.experts.{}.up_proj.weight"
    dense = load_file(DENSE)
    np.testing.assert_array_equal(mixed, [dense[name.format(e)].astype(np.float32) for e in range(len(mixed))])


def negated(source, path, name):
    def change(tensors):
        tensors[name] = (-tensors[name].astype(np.float32)).astype(ml_dtypes.bfloat16)

    return edited(source, path, change)


@pytest.fixture
def uncached():
    """The compilation cache off, and on again for later tests."""
    before = jax.config.jax_enable_compilation_cache
    yield ["--set", "compilation_cache=false"]
    jax.config.update("jax_enable_compilation_cache", before)


def test_a_broken_drafter_is_found_though_every_token_agrees(tmp_path):
    results = list(check(Bundle(negated(DENSE, tmp_path / "wrong", "drafter.fc.weight")), CPU_EXACT))
    assert all(result.divergence is None for result in results)
    assert [result.passes() for result in results[:2]] == [True, True]
    assert not all(result.passes() for result in results) and all(result.passes(1e-3) for result in results)


@pytest.fixture
def broken(folder, tmp_path):
    """A bundle without a drafter, whose final norm has another sign than the one that its tokens were decoded with."""
    cases = [Case(*case[:3]) for case in Bundle(DENSE).cases]
    write_bundle(tmp_path / "right", folder / "target", None, cases, tree_budget=7, weights="dense")
    return str(negated(tmp_path / "right", tmp_path / "wrong", "target.model.norm.weight"))


def test_a_broken_target_is_found_with_both_margins(broken, capsys, uncached):
    assert main(["bundle", "check", broken, "--tolerance", "1e-6", *uncached]) == 1
    first, _, last = capsys.readouterr().out.splitlines()
    said = r"DIVERGES at new token (\d+): golden (\d+) by a margin of (\S+) logits, here (\d+) by "
    position, golden, margin, token = map(float, re.search(said, first).groups())
    case = Bundle(DENSE).cases[0]
    assert case.tokens[int(position)] == golden != token
    assert case.margins[int(position)] == pytest.approx(margin, rel=1e-3)
    assert last == "0 of 2 agree"


def test_a_broken_target_is_found_on_a_mesh_too(broken, tmp_path, capsys, uncached):
    (tmp_path / "mesh.toml").write_text("[mesh]\nexpert = 2\n")
    assert main(["bundle", "check", broken, "--json", "--mesh", str(tmp_path / "mesh.toml"), *uncached]) == 1
    result = json.loads(capsys.readouterr().out)
    first = result["results"][0]["divergence"]
    assert result["passes"] is False and first["token"] != first["golden_token"] and first["margin"] > 0


def test_margins_are_those_of_the_reference_logits(folder):
    [case] = decode_cases(folder / "target", None, PROMPTS[:1], max_new_tokens=5, tree_budget=7)
    assert (case.tree_tokens, case.tree_accepted) == ((), ())
    golden = Bundle(INT4).cases[0]
    assert case.tokens == golden.tokens[:5] and case.margins == pytest.approx(golden.margins[:5])
    assert min(golden.margins) > 1e-4, "a near-tie: float32 may decode something else"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("target.lm_head.weight"), "lacks target.lm_head.weight: make it again"),
        (lambda tensors: tensors.pop("case.1.tree.accepted"), "lacks case.1.tree.accepted"),
        (
            lambda tensors: tensors.update({"target.model.norm.weight": np.zeros(3, np.float32)}),
            r"target.model.norm.weight is F32 \[3\], its config says BF16 or F32 \[64\]",
        ),
        (
            lambda tensors: tensors.pop("target.model.layers.1.mlp.experts.0.up_proj.weight.qw"),
            "up_proj is INT4 in some experts and not in others",
        ),
    ],
)
def test_a_damaged_bundle_is_named(tmp_path, change, said):
    with pytest.raises(KdjaxError, match=said):
        Bundle(edited(INT4, tmp_path / "broken", change)).extract(tmp_path / "out")


def test_other_files_are_no_bundles(tmp_path):
    (tmp_path / "text").write_text("x")
    with pytest.raises(KdjaxError, match="text is not a readable safetensors file"):
        Bundle(tmp_path / "text")
    save_file({}, tmp_path / "plain")
    with pytest.raises(KdjaxError, match="plain is None version None, not kdjax-bundle version 1"):
        Bundle(tmp_path / "plain")
    save_file({}, tmp_path / "bad", metadata={"format": "kdjax-bundle", "version": "1", "header": "{"})
    with pytest.raises(KdjaxError, match="bad has a damaged header"):
        Bundle(tmp_path / "bad")


def test_the_command_makes_bundles_of_text_and_of_ids(folder, tmp_path, capsys):
    model = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "-n", "3", "--budget", "2"]
    assert main(["bundle", "make", *model, "--ids", "1,2", "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/b: 1 prompt, 3 tokens each, smallest margin ")
    bundle = Bundle(tmp_path / "b")
    assert bundle.header.tree_budget == 2 and bundle.cases[0].prompt == (1, 2)
    for argv, said in (
        ([*model, "--out", str(tmp_path / "c")], "no prompt: give text, or token ids with --ids"),
        ([*model, "--ids", "1,2", "--out", str(tmp_path / "b")], "b exists: give another name"),
        ([*model, "--ids", "64", "--out", str(tmp_path / "c")], "prompt token 64 is outside the vocabulary of 64 ids"),
        ([*model, "--ids", "x", "--out", str(tmp_path / "c")], "expected token ids such as 1,2,3, not 'x'"),
    ):
        assert main(["bundle", "make", *argv]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_bundle_that_shrinks_while_it_is_read(tmp_path):
    shutil.copyfile(INT4, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle")
    os.truncate(tmp_path / "bundle", INT4.stat().st_size // 2)
    with pytest.raises(KdjaxError, match=r"bundle: \d+ bytes of target\..* the file became shorter while it was read"):
        bundle.extract(tmp_path / "out")
    with pytest.raises(KdjaxError, match="bundle is not a readable safetensors file"):
        Bundle(tmp_path / "bundle")
