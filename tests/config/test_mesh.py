"""Mesh files and what they say is split over which axes."""

import pathlib
import re

import pytest

from kdjax.config import Cluster, DeviceConfig, MeshConfig, load
from kdjax.errors import KdjaxError

FILES = sorted((pathlib.Path(__file__).parents[2] / "configs/meshes").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_shipped_meshes_have_as_many_devices_as_their_name_says(file):
    count = int(re.search(r"(?:x|cpu)(\d+)", file.stem).group(1))
    assert load(Cluster, file).mesh.devices == count


def test_axes_of_size_one_are_left_out():
    assert MeshConfig().all_axes == ()
    mesh = MeshConfig(tensor=2, sequence=2)
    assert mesh.model_axes == mesh.expert_width_axes == ("sequence", "tensor")
    assert mesh.cache_axes == ("sequence",) and mesh.expert_axes == ()


def test_the_expert_axis_splits_or_repeats_what_is_not_an_expert():
    mesh = MeshConfig(tensor=2, expert=4)
    assert (mesh.size(mesh.model_axes), mesh.size(mesh.drafter_axes)) == (8, 8)
    mesh = MeshConfig(tensor=2, expert=4, outside_experts="replicated")
    assert (mesh.model_axes, mesh.drafter_axes, mesh.all_axes) == (("tensor",), ("tensor",), ("expert", "tensor"))
    assert MeshConfig(tensor=2, drafter="replicated").drafter_axes == ()


def test_all_reduce_cost_grows_with_the_message():
    device = DeviceConfig(kind="x", memory_gb=1.0, read_gb_per_s=1.0, all_reduce_us=10.0, all_reduce_gb_per_s=100.0)
    assert device.all_reduce_ms(1_000_000) == pytest.approx(0.02)
    assert DeviceConfig(kind="x", memory_gb=1.0, read_gb_per_s=1.0).all_reduce_ms(1) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mesh]\ntensor = 0", "mesh.tensor = 0"),
        ("[mesh]\ntenser = 2", "unknown key 'tenser' in \\[mesh\\]: did you mean tensor?"),
        ('[mesh]\ndrafter = "none"', "mesh.drafter = 'none'"),
        ("[device]\nkind = 'x'", "mesh"),
    ],
)
def test_bad_mesh_files_are_refused(tmp_path, text, message):
    file = tmp_path / "mesh.toml"
    file.write_text(text)
    with pytest.raises(KdjaxError, match=message):
        load(Cluster, file)
    with pytest.raises(KdjaxError, match="mesh expert=0 must be at least 1"):
        MeshConfig(expert=0)
