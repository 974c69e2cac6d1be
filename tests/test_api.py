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


MISTAKES = {
    "load_target(nano / 'target', GPU)": "backend = 'triton' needs an NVIDIA GPU and JAX runs on cpu: use 'xla'",
    "load_drafter(nano / 'drafter', GPU, target.config)": "needs an NVIDIA GPU",
    "Decoder(target, drafter, config, GPU)": "needs an NVIDIA GPU",
    "Decoder(target, None, DecodeConfig(mode='autoregressive'), OTHER)": "the target was loaded with another runtime "
    "than the decoder's: give the decoder that of load_target",
    "Decoder(other, drafter, config, OTHER)": "the drafter was loaded with another runtime",
    "Decoder(target, drafter, config, CPU_EXACT, slots='2')": "slots='2' is of type str: give an integer",
    "decoder.generate(request)": "is no list of requests: put a single kdjax.Request in brackets",
    "decoder.generate('hello')": "'hello' is no list of requests",
    "decoder.generate(['hello'])": "request 0 is 'hello', no kdjax.Request: encode text with the tokenizer",
    "Engine(decoder).submit('hello')": "request 0 is 'hello', no kdjax.Request: encode text with the tokenizer",
    "decoder.generate([Request(prompt_ids=(1,), max_new_tokens='4')])": "max_new_tokens='4' is of type str: give",
    "DecodeConfig(budget='7')": "budget='7' is of type str: give an integer",
    "DecodeConfig(top_k=1.5)": "top_k=1.5 is of type float: give an integer",
    "DecodeConfig(budget=True)": "budget=True is of type bool: give an integer",
    "DecodeConfig(temperature='0.7')": "temperature='0.7' is of type str: give a number",
}


def test_mistakes_from_python_are_one_line_with_the_remedy():
    """In a process that checks no types, as that of a user."""
    program = f"""
import jax
from kdjax import *
from kdjax import bundled_model
jax.config.update("jax_platforms", "cpu")
nano, OTHER = bundled_model("nano"), Runtime(compute_dtype="float32", cache_dtype="float32")
target = load_target(nano / "target", CPU_EXACT)
drafter = load_drafter(nano / "drafter", CPU_EXACT, target.config)
other = load_target(nano / "target", OTHER)
config, request = DecodeConfig(), Request(prompt_ids=(1,), max_new_tokens=4)
decoder = Decoder(target, drafter, config, CPU_EXACT)
for mistake in {list(MISTAKES)}:
    try:
        eval(mistake)
    except KdjaxError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), MISTAKES.values(), strict=True):
        assert expected in said


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'decoder'"):
        kdjax.decoder  # noqa: B018
