"""`kdjax` with the toy experiment, for tests that kill the process."""

import sys

import experiments
import tests.run.toy
from kdjax.cli import main

experiments.EXPERIMENTS["toy"] = "toy"
sys.modules["experiments.toy"] = tests.run.toy
sys.exit(main(sys.argv[1:]))
