"""The documentation keeps what it promises: reference, navigation, links, commands and the figures they print."""

import ast
import importlib
import inspect
import json
import pathlib
import re
import shlex

import pytest

import kdjax
from experiments import budget_sweep
from kdjax.cli import command
from kdjax.cli.interrupt import Interrupt
from kdjax.config import ModelPair, load
from kdjax.config.sweep import read_sweep
from kdjax.decode import pool, tau_macro
from kdjax.evaluate import documents

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")])
TEXTS = [*(page for page in PAGES if page.suffix == ".md"), *ROOT.glob("*.md"), ROOT / "kdjax/bundled/nano/README.md"]
TARGETS = {
    target
    for page in (DOCS / "reference").glob("*.md")
    for target in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
PACKAGES = [
    ".".join(init.parent.relative_to(ROOT).parts)
    for root in ("kdjax", "pallas_kernels")
    for init in sorted((ROOT / root).rglob("__init__.py"))
    if init.parent.name not in ("cli", "bench")  # the command: its guides are its reference
]
BLOCK = re.compile(r"```\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def public_names(package: str) -> dict[str, str]:
    """Name -> where it is defined: what `__init__` imports as itself or lists in `__all__`, and its own functions."""
    module = importlib.import_module(package)
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    listed = getattr(module, "__all__", [])
    found = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name or alias.name in listed
    }
    own = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    found |= {name: f"{package}.{name}" for name in own if not name.startswith("_")}
    for name in found:
        value = getattr(module, name)
        if inspect.isclass(value) or hasattr(value, "__wrapped__") or inspect.isfunction(value):
            found[name] = f"{value.__module__}.{value.__qualname__}"
    return found


def resolve(target: str):
    """The module or object that a reference page names."""
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError:
        module, _, name = target.rpartition(".")
        return getattr(importlib.import_module(module), name)


def own_doc(value) -> str:
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    # What dataclass and NamedTuple write by themselves says nothing.
    return "" if not doc or doc.startswith(f"{getattr(value, '__name__', '')}(") else doc


def documented(path: str, value) -> list[str]:
    """Paths of what is public there and has no docstring."""
    if inspect.ismodule(value):
        members = {
            name: member
            for name, member in vars(value).items()
            if not name.startswith("_") and getattr(member, "__module__", None) == value.__name__ and callable(member)
        }
        missing = [] if value.__doc__ else [path]
        return missing + [bad for name, member in members.items() for bad in documented(f"{path}.{name}", member)]
    if not callable(value):
        return []
    missing = [] if own_doc(value) else [path]
    if inspect.isclass(value):
        for name, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if name.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
                continue
            if not function.__doc__ and not hasattr(protocol_of(value), name):
                missing.append(f"{path}.{name}")
    return missing


def protocol_of(kind: type) -> type | None:
    """The protocol whose docstrings hold for the methods of a class that implements it."""
    from kdjax.decode import DFlash, Drafting

    return Drafting if kind is DFlash else None


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    absent = {
        name: home
        for name, home in public_names(package).items()
        if home not in TARGETS and home.rpartition(".")[0] not in TARGETS
    }
    assert not absent, f"add a line '::: {next(iter(absent.values()))}' to a page in docs/reference"


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_the_reference_shows_has_docstrings(target):
    assert not documented(target, resolve(target))


def arguments(function) -> set[str]:
    """Names in the section Args of a docstring."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^    (\S[^:]*):", section, re.MULTILINE))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_documented_arguments_exist(target):
    found = resolve(target)
    functions = [f for f in (vars(found).values() if inspect.ismodule(found) else [found]) if inspect.isfunction(f)]
    for function in functions:
        assert arguments(function) <= inspect.signature(function).parameters.keys()


def test_a_class_or_function_without_docstring_is_found():
    def bare():
        pass

    class Bare:
        """Here."""

        def method(self):
            pass

    assert documented("bare", bare) == ["bare"] and documented("Bare", Bare) == ["Bare.method"]


def test_navigation_lists_every_page_once():
    nav = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[1].split("\n\n")[0]
    listed = re.findall(r"[\w./-]+\.(?:md|ipynb)", nav)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(text):
    links = [link for link in LINK.findall(text.read_text()) if "://" not in link]
    assert not [link for link in links if not (text.parent / link).exists()]
    # The site has nothing but docs: name another file as `path/from/root`, without a link.
    assert not [
        link for link in links if text.is_relative_to(DOCS) and not (text.parent / link).resolve().is_relative_to(DOCS)
    ]


def test_every_verb_has_a_guide():
    guides = {page.stem for page in (DOCS / "guides").glob("*.md")} | (
        {"eval"} if DOCS / "evaluation.md" in PAGES else set()
    )
    assert set(command.VERBS) <= guides


def commands(text: pathlib.Path) -> list[str]:
    """The calls of `kdjax` in its code blocks, without what is piped into them and out of them."""
    lines = [line for block in BLOCK.findall(text.read_text()) for line in block.splitlines()]
    pieces = [piece for line in lines for piece in re.split(r" (?:\||&&) ", line.removeprefix("$ "))]
    return [found[1] for piece in pieces if (found := re.fullmatch(r"(?:[A-Z_]+=\S+ )*(kdjax .*)", piece))]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_options_that_they_use(text):
    for line in commands(text):
        command._parse(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize(
    "text", [*TEXTS, *(ROOT / "configs").rglob("*.toml")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_lists_of_commands_are_quoted_or_some_shells_take_them_for_names_of_files(text):
    assert not re.findall(r"--set [^\s'\"]*\[.*", text.read_text())


def test_a_command_with_an_option_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\ngit log | FLAG=1 kdjax generate --no-such-option - | less\n```\n")
    [line] = commands(page)
    with pytest.raises(ValueError, match="unrecognized arguments: --no-such-option"):
        command._parse(shlex.split(line, comments=True)[1:])


PRINTED = [
    ("import json", 128, 15),
    ("import json", 128, 0),
    ("def fibonacci(n):", 128, 15),
    ("def fibonacci(n):", 32, 15),
]
"""Examples of the guides generate and bundle: prompt, tokens, tree budget."""
NOTEBOOK = json.loads((DOCS / "notebooks/quickstart.ipynb").read_text())["cells"]
SWEEP = read_sweep(
    ROOT / "configs/experiments/budget_sweep.toml", kind_of=lambda name: budget_sweep.Config, smoke=True
).cells


def guide(name: str) -> str:
    return (DOCS / f"guides/{name}.md").read_text()


def of_the_notebook() -> tuple[list[tuple[str, int, int]], dict[int, float]]:
    """What its loop over budgets decodes, and the tau that it printed; of budgets up to 15."""
    cells = [cell for cell in NOTEBOOK if cell["cell_type"] == "code"]
    prompts = ast.literal_eval(re.search(r"prompts = (\[.*\])", "".join(cells[1]["source"]))[1])
    printed = "".join(text for cell in cells for output in cell["outputs"] for text in output.get("text", []))
    taus = {budget: tau for budget, tau in ast.literal_eval(re.search(r"{0: .*}", printed)[0]).items() if budget <= 15}
    return [(prompt, 48, budget) for budget in taus for prompt in prompts], taus


def of_the_sweep(config: budget_sweep.Config) -> list[tuple[str, int, int]]:
    section = config.prompts
    return [(prompt.text, section.new_tokens, config.decode.budget) for prompt in documents.read(section, "prompts")]


@pytest.fixture(scope="module")
def statistics():
    """Of all texts whose figures are printed somewhere: decoded at once, by one compiled program."""
    nano = kdjax.bundled_model("nano")
    target = kdjax.load_target(nano / "target", kdjax.CPU_EXACT)
    drafter = kdjax.load_drafter(nano / "drafter", kdjax.CPU_EXACT, target.config)
    tokenizer = kdjax.Tokenizer.from_checkpoint(nano / "target")
    decoder = kdjax.Decoder(target, drafter, kdjax.DecodeConfig(budget=15), kdjax.CPU_EXACT, slots=4, context=192)
    texts = [*PRINTED, *of_the_notebook()[0], *(text for cell in SWEEP for text in of_the_sweep(cell.config))]
    requests = [
        kdjax.Request(prompt_ids=tuple(tokenizer.encode_prompt(text)), max_new_tokens=new, budget=budget)
        for text, new, budget in texts
    ]
    return {text: one.statistics for text, one in zip(texts, decoder.generate(requests), strict=True)}


def test_printed_figures_of_single_texts_are_those_of_the_bundled_model(statistics):
    compared, plain, generated, bundled = (statistics[text] for text in PRINTED)
    first, second = generated.acceptance_by_depth[:2]
    assert f" verify passes {generated.rounds:>13}\n tau micro {generated.tau:>17.2f}\n" in guide("generate")
    assert f" accepted at depth 1 {first:>7.0%}\n accepted at depth 2 {second:>7.0%}\n" in guide("generate")
    passes, tau = (
        re.search(rf"^ {name} +(\S+) +\S+ +(\S+)$", guide("generate"), re.M).groups()
        for name in ("verify passes", "tau micro")
    )
    assert passes == (f"{compared.rounds}", f"{plain.rounds}")
    assert tau == (f"{compared.tau:.2f}", f"{plain.tau:.2f}")
    assert f"tree: 32 tokens agree in {bundled.rounds} rounds" in guide("bundle")


@pytest.mark.parametrize("cell", SWEEP, ids=lambda cell: cell.name)
def test_printed_figures_of_the_small_budget_sweep_are_those_of_the_bundled_model(cell, statistics):
    found = [statistics[text] for text in of_the_sweep(cell.config)]
    micro, macro = pool(found).tau, tau_macro(found)
    assert re.search(rf"^ {cell.name} +{micro:.4g} \[\S+ \S+\] +{macro:.4g} \[", guide("run"), re.M)
    assert re.search(rf"^ {cell.name} +tau_micro +{micro:.4g} ", guide("compare"), re.M)


def test_printed_figures_of_the_notebook_are_those_of_the_bundled_model(statistics):
    texts, taus = of_the_notebook()
    assert taus == {
        budget: round(pool([statistics[text] for text in texts if text[2] == budget]).tau, 2) for budget in taus
    }


def test_printed_sizes_of_synth_are_those_of_the_config():
    pair = load(ModelPair, ROOT / "configs/models/nano.toml")
    layers = re.findall(r"^runs/random/(?:target|drafter): (\d+) layers", guide("synth"), re.M)
    assert layers == [str(pair.target.num_hidden_layers), str(pair.drafter.num_hidden_layers)]


def test_printed_lines_of_plan_are_what_it_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    call, printed, *_ = BLOCK.findall(guide("plan"))
    command.run(shlex.split(call)[1:], Interrupt())
    found = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {" ".join(line.split()) for line in printed.splitlines()} - {"", "..."} <= found
