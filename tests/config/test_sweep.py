"""Lists in a config make the cells of a sweep; what is read is what the run folder keeps."""

import msgspec
import pytest

from kdjax.config import GenerateConfig
from kdjax.config.sweep import read_sweep
from kdjax.errors import KdjaxError

pytestmark = pytest.mark.newest


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    decode: GenerateConfig = GenerateConfig()
    widths: tuple[int, ...] = (1, 2)
    repeats: int = 3
    seed: int | None = None


@pytest.fixture
def read(tmp_path):
    def read_text(text, *overrides, smoke=False, name="sweep.toml"):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        return read_sweep(file, overrides, kind_of={"made": Settings}.__getitem__, smoke=smoke)

    return read_text


GRID = 'experiment = "made"\nrepeats = 2\n[decode.decode]\nmode = ["tree", "chain"]\nbudget = [7, 15]\n'


def names(sweep):
    return [cell.name for cell in sweep.cells]


def test_lists_are_axes_and_cells_their_product(read):
    sweep = read(GRID)
    assert names(sweep) == ["mode=tree budget=7", "mode=tree budget=15", "mode=chain budget=7", "mode=chain budget=15"]
    assert [(c.config.decode.decode.mode, c.config.decode.decode.budget) for c in sweep.cells][-1] == ("chain", 15)
    assert all(c.config.repeats == 2 for c in sweep.cells)


def test_without_a_list_there_is_one_cell(read):
    assert names(read('experiment = "made"\n')) == ["all"]


def test_a_key_that_holds_a_list_is_swept_by_a_list_of_lists(read):
    assert names(read('experiment = "made"\nwidths = [3, 4]\n')) == ["all"]
    sweep = read('experiment = "made"\nwidths = [[3, 4], [5]]\n')
    assert names(sweep) == ["widths=3+4", "widths=5"] and sweep.cells[0].config.widths == (3, 4)


def test_overrides_make_axes_and_win_over_smoke(read):
    text = GRID + "[smoke]\nrepeats = 1\n[smoke.decode.decode]\nmode = 'tree'\n"
    assert len(read(text).cells) == 4
    small = read(text, "decode.decode.budget=[1, 2, 3]", smoke=True)
    assert names(small) == ["budget=1", "budget=2", "budget=3"] and small.cells[0].config.repeats == 1
    assert read(text, "repeats=9", smoke=True).cells[0].config.repeats == 9


def test_listed_cells_may_differ_in_any_key_and_hold_axes(read):
    sweep = read('experiment = "made"\n[[cells]]\nrepeats = 5\n[[cells]]\nseed = [1, 2]\n')
    assert names(sweep) == ["repeats=5", "seed=1", "seed=2"]
    assert [c.config.repeats for c in sweep.cells] == [5, 3, 3]
    assert [c.config.seed for c in sweep.cells] == [None, 1, 2]


def test_an_empty_table_is_the_sweep_of_the_file(read):
    text = 'experiment = "made"\nseed = [1, 2]\n[[cells]]\n[[cells]]\nrepeats = 5\nseed = 3\n'
    assert names(read(text)) == ["seed=1", "seed=2", "repeats=5 seed=3"]
    assert names(read(text, "seed=[7, 8]")) == ["seed=7", "seed=8", "repeats=5 seed=3"]
    assert names(read(text, "cells=[]")) == ["seed=1", "seed=2"]
    assert names(read(text, "cells=[]", "decode.decode.mode=[tree,chain]", "seed=1")) == ["mode=tree", "mode=chain"]


def test_names_do_not_depend_on_the_layout_of_the_file(read):
    one = read('experiment = "made"\nseed = [1, 2]\n[decode.decode]\nbudget = [3]\n')
    other = read('experiment = "made"\n[decode.decode]\nbudget = [3]\n', "seed=[1, 2]")
    assert names(one) == names(other) == ["budget=3 seed=1", "budget=3 seed=2"]


@pytest.mark.parametrize("text", [GRID, 'experiment = "made"\n[[cells]]\nrepeats = 5\n[[cells]]\nseed = [1, 2]\n'])
def test_the_resolved_document_has_every_key_and_gives_the_same_cells(read, text):
    sweep = read(text)
    again = read(sweep.toml, name="resolved.toml")
    assert again.cells == sweep.cells
    assert sweep.document["decode"]["decode"]["rounds_per_call"] == 16


def test_the_resolved_file_says_what_is_left_to_the_device(read):
    """A key that only some cells set is open in the others; what all of them set is not."""
    text = (
        'experiment = "made"\n[decode.runtime]\nlayout = "checkpoint"\n'
        '[[cells]]\ndecode = { runtime = { backend = "xla", cache_dtype = "float32" } }\n'
        '[[cells]]\ndecode = { runtime = { cache_dtype = "bfloat16" } }\n'
    )
    said = "chosen by the device: compute_dtype, expert_weights, backend\n"
    assert read(text).toml.splitlines(keepends=True)[0] == f"# what a cell leaves out of [decode.runtime] is {said}"


@pytest.mark.parametrize(
    "text, overrides, said",
    [
        (GRID, ["decode.decode.budget=[]"], "--set decode.decode.budget=[]: decode.decode.budget = []: give at least"),
        (GRID, ["decode.decode.budget=[1, -1]"], "--set decode.decode.budget=[1, -1]: decode.decode.budget = -1:"),
        (GRID, ["decode.decode.budgets=[1]"], "unknown key 'budgets' in [decode.decode]: did you mean budget?"),
        (GRID, ["decode.decode.budget=[3, 3]"], "['mode=tree budget=3'] twice"),
        (GRID + "[smoke]\nrepeat = 1\n", [], "unknown key 'repeat' in [smoke]: did you mean repeats?"),
        ('experiment = "made"\n[[cells]]\nseed = 1\n', ["seed=2"], "--set seed=2: every table of [[cells]] sets seed"),
        ("repeats = 1\n", [], "no experiment is named"),
        ('experiment = "made"\ncells = 3\n', [], "write [[cells]] above each"),
        ('experiment = "made"\nsmoke = 3\n', [], "smoke must be a table"),
    ],
)
def test_mistakes_name_source_and_remedy(read, text, overrides, said):
    with pytest.raises(KdjaxError) as caught:
        read(text, *overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_answered_with_the_nearest_sweep(read):
    read(GRID, name="budget_sweep.toml")
    with pytest.raises(KdjaxError, match=r"did you mean budget_sweep.toml\?"):
        read(None, name="budget_swep.toml")
