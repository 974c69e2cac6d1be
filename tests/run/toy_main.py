"""`kdjax` with the toys, for tests that kill the process."""

import sys

import experiments
import tests.run.toy
from kdjax import evaluate
from kdjax.cli import main

experiments.EXPERIMENTS["toy"] = "toy"
sys.modules["experiments.toy"] = tests.run.toy
evaluate.EVALUATIONS["toy"] = "tests.run.toy_units"
sys.exit(main(sys.argv[1:]))
