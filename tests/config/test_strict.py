"""Strict reading: what is accepted, and that every mistake is one line with the source, the value and the remedy."""

import pathlib

import msgspec
import pytest

from kdjax.config import GenerateConfig, ModelPair, dumps, load
from kdjax.config.strict import Document
from kdjax.errors import KdjaxError

pytestmark = pytest.mark.newest
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def refused(kind=GenerateConfig, file=None, overrides=()) -> str:
    with pytest.raises(KdjaxError) as caught:
        load(kind, file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> pathlib.Path:
        file = tmp_path / "run.toml"
        file.write_text(text)
        return file

    return write


def test_overrides_take_toml_values_and_bare_words_and_the_last_one_wins(toml):
    config = load(
        GenerateConfig,
        toml("[decode]\nbudget = 7\nseed = 3\n"),
        [
            "decode.budget=15",
            "decode.temperature=1",
            "decode.mode=chain",
            "model.target=a b/c=d",
            "decode.budget = 31",
        ],
    )
    assert (config.decode.budget, config.decode.seed, config.decode.temperature) == (31, 3, 1.0)
    assert (config.decode.mode, config.model.target) == ("chain", "a b/c=d")
    assert load(GenerateConfig, None, ['model.target="12"']).model.target == "12"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("[tree,chain]", ["tree", "chain"]),
        ("[ tree, a b , 7, 0.5, true ]", ["tree", "a b", 7, 0.5, True]),
        ('["a,b", chain]', ["a,b", "chain"]),
        ('["a,b,c", chain]', None),
        ("[[a,b],[c]]", [["a", "b"], ["c"]]),
        ("[tree,]", ["tree"]),
        ("[/models/x.y-2,bundled:nano]", ["/models/x.y-2", "bundled:nano"]),
    ],
)
def test_lists_may_hold_bare_words_because_a_shell_takes_quotes_off(value, read):
    document = Document(None, {})
    if read is None:
        with pytest.raises(KdjaxError, match="not valid TOML"):
            document.override(f"x={value}")
    else:
        document.override(f"x={value}")
        assert document.data == {"x": read}


def test_resolved_config_round_trips(toml):
    config = load(GenerateConfig, None, ["decode.top_p=0.9", "prompt.chat=true", "prompt.system=be brief"])
    assert load(GenerateConfig, toml(dumps(config))) == config
    assert hash(config) == hash(load(GenerateConfig, toml(dumps(config))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[decode]\nbudgte = 7", "unknown key 'budgte' in [decode]: did you mean budget?"),
        ("[decod]\nbudget = 7", "unknown key 'decod' at the top level: did you mean decode?"),
        ("zzz = 1", "unknown key 'zzz' at the top level: choose from model, prompt, decode, runtime"),
        ('[decode]\nbudget = "7"', "decode.budget = '7': expected `int`, got `str`"),
        ("[decode]\nbudget = true", "decode.budget = True: expected `int`, got `bool`"),
        ("[decode]\nbudget = 1.5", "decode.budget = 1.5: expected `int`, got `float`"),
        ("[decode]\nmax_new_tokens = 0", "decode.max_new_tokens = 0: expected `int` >= 1"),
        ("[decode]\nmax_new_tokens = -4", "decode.max_new_tokens = -4: expected `int` >= 1"),
        ("[decode]\ntop_p = 0.0", "decode.top_p = 0.0: expected `float` > 0"),
        ("[decode]\ntemperature = nan", "decode.temperature = nan: expected `float` >= 0"),
        ("[decode]\ntemperature = inf", "decode.temperature = inf: expected `float` <= 100"),
        ("[decode]\nseed = 4294967296", "decode.seed = 4294967296: expected `int`"),
        ('[decode]\nmode = "tre"', "decode.mode = 'tre': not one of its values: did you mean tree?"),
        ('[decode]\nmode = "x"', "choose from tree, chain, autoregressive"),
        ("decode = 3", "decode = 3: expected `object`, got `int`"),
        ("[decode]\nbudget = ", "not valid TOML"),
    ],
)
def test_mistakes_in_a_file_name_file_key_and_remedy(toml, text, said):
    file = toml(text)
    message = refused(file=file)
    assert message.startswith(f"{file}: ") and said in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("decode.budgte=3", "--set decode.budgte=3: unknown key 'budgte' in [decode]: did you mean budget?"),
        ("decode.budget=many", "--set decode.budget=many: decode.budget = 'many': expected `int`, got `str`"),
        ("decode.budget=[1,2", "--set decode.budget=[1,2: the value is not valid TOML"),
        ("decode.mode=[tree,", "quote all of it: --set 'decode.mode=...'"),
        ("decode.budget", "--set decode.budget: expected KEY=VALUE"),
        (".budget=3", "--set .budget=3: expected KEY=VALUE"),
        ("decode.temperature=nan", "--set decode.temperature=nan: decode.temperature = nan: expected `float`"),
        ("decode.mode=tree\nseed = 3", "decode.mode = 'tree\\nseed = 3': not one of its values"),
    ],
)
def test_mistakes_in_an_override_name_the_override(override, said):
    assert said in refused(overrides=[override])


def test_override_below_a_value_is_refused():
    message = refused(overrides=["decode.budget=1", "decode.budget.x=3"])
    assert message == "--set decode.budget.x=3: decode.budget is a value, not a table: drop '.x'"


def test_file_and_override_are_told_apart(toml):
    file = toml('[decode]\nbudget = "x"')
    assert refused(file=file, overrides=["decode.seed=1"]).startswith(f"{file}: decode.budget")
    assert load(GenerateConfig, file, ["decode.budget=2"]).decode.budget == 2


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert refused(file=tmp_path / "gredy.toml").endswith("no such config file")
    (tmp_path / "greedy.toml").touch()
    assert "no such config file: did you mean greedy.toml?" in refused(file=tmp_path / "gredy.toml")
    assert "cannot read the config file" in refused(file=tmp_path)


@pytest.mark.parametrize("file", sorted((CONFIGS / "generate").glob("*.toml")), ids=lambda f: f.stem)
def test_generate_examples_are_valid(file):
    config = load(GenerateConfig, file)
    assert msgspec.to_builtins(config)["decode"]["budget"] >= 1


@pytest.mark.parametrize("file", sorted((CONFIGS / "models").glob("*.toml")), ids=lambda f: f.stem)
def test_model_examples_are_valid(file):
    pair = load(ModelPair, file)
    assert pair.drafter is not None and pair.drafter.vocab_size == pair.target.vocab_size


def test_kimi_dimensions_give_the_published_parameter_counts():
    pair = load(ModelPair, CONFIGS / "models" / "kimi-k2.6.toml")
    t, d = pair.target, pair.drafter
    attention = (
        t.q_lora_rank * (t.hidden_size + t.num_attention_heads * t.qk_head_dim)
        + t.hidden_size * t.latent_dim
        + t.kv_lora_rank * t.num_attention_heads * (t.qk_nope_head_dim + t.v_head_dim)
        + t.num_attention_heads * t.v_head_dim * t.hidden_size
    )
    assert attention + t.q_lora_rank + t.kv_lora_rank == 101_124_096
    assert 3 * t.hidden_size * t.moe_intermediate_size == 44_040_192
    assert t.vocab_size * t.hidden_size == 1_174_405_120
    heads = (d.num_attention_heads + d.num_key_value_heads) * 2 * d.head_dim * d.hidden_size
    norms = 2 * d.hidden_size + 2 * d.head_dim
    layers = d.num_hidden_layers * (heads + 3 * d.hidden_size * d.intermediate_size + norms)
    assert layers + len(d.target_layer_ids) * d.hidden_size**2 + 2 * d.hidden_size == 3_479_277_056


def test_model_pair_that_does_not_fit_is_refused():
    kimi = CONFIGS / "models" / "kimi-k2.6.toml"
    message = refused(ModelPair, kimi, ["drafter.hidden_size=256"])
    assert "the drafter is made for a target of hidden_size 256, but target.hidden_size = 7168" in message
    message = refused(ModelPair, kimi, ["target.rope_scaling.factr=2"])
    assert "unknown key 'factr' in [target.rope_scaling]: did you mean factor?" in message
    message = refused(ModelPair, kimi, ['drafter.layer_types=["full", "full_attention"]'])
    assert "drafter.layer_types[0]" in message
