"""Measures of a model on text."""

from kdjax.evaluate.perplexity import Score as Score
from kdjax.evaluate.perplexity import Scorer as Scorer
from kdjax.evaluate.perplexity import pool as pool
