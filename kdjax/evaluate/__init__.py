"""Measures of a model: what `kdjax eval` runs, one module each, and what they are made of."""

from kdjax.evaluate.rolling import Score as Score
from kdjax.evaluate.rolling import Scorer as Scorer
from kdjax.evaluate.rolling import pool as pool

BENCHMARKS = ("gsm8k", "hellaswag", "humaneval", "math500", "mbpp", "mmlu", "truthfulqa")

EVALUATIONS = {
    "agreement": "kdjax.evaluate.agreement",
    "exactness": "kdjax.evaluate.exactness",
    "perplexity": "kdjax.evaluate.perplexity",
} | {name: f"kdjax.evaluate.benchmarks.{name}" for name in BENCHMARKS}
"""The modules by the name that a config gives, imported at first use."""
