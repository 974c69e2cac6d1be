"""The slow truth, in NumPy float64: model, drafter, tree and decode loop, written to be read next to the papers.

Nothing here imports JAX. One stream at a time, no padding, no capacity: what the fast path must reproduce.
"""
