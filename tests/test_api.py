"""The flat namespace: `import kdjax` is cheap, and every name that it promises is there."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kdjax


def test_import_is_free_of_jax_and_any_name_brings_it():
    program = "import sys, kdjax; assert 'jax' not in sys.modules; kdjax.Runtime; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_are_the_same_for_readers_type_checkers_and_python():
    tree = ast.parse(pathlib.Path(kdjax.__file__).read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    declared = [alias.name for node in checked.body for alias in node.names]
    assert sorted(declared) == sorted(kdjax.__all__) == sorted(set(dir(kdjax)) & set(declared))
    for name in kdjax.__all__:
        assert getattr(kdjax, name).__class__ is not type(kdjax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'decoder'"):
        kdjax.decoder  # noqa: B018
