"""Experiments: training of the small bundled model (`nano`), and what `kdjax run` runs, one module each."""

EXPERIMENTS = {
    "budget_sweep": "tau and speed by the number of tree nodes (DDTree, figure 3)",
}
"""What each does, by the name that a config gives in its key `experiment`."""
