"""Experiments: training of the small bundled model (`nano`), and what `kdjax run` runs, one module each."""

EXPERIMENTS = {
    "ablations": "static tree, chain, DDTree and cost-aware budgets (CaDDTree)",
    "acceptance_by_depth": "how deep drafts are accepted, chain and trees (DDTree, figure 4)",
    "attention_sweep": "tree attention by nodes, streams and prefix",
    "budget_sweep": "tau and speed by the number of tree nodes (DDTree, figure 3)",
    "calibration": "the drafter's probabilities against measured acceptance",
    "drafter_precision": "the drafter in bf16 and INT4",
    "expert_reuse": "distinct experts of a verify batch",
    "moe_sweep": "routed INT4 experts by tokens",
    "throughput": "decode throughput by concurrency, slots refilled",
    "tree_builder": "the heap on the host against the device builder",
}
"""What each does, by the name that a config gives in its key `experiment`."""
