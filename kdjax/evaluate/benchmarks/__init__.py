"""Benchmarks over local files, one module each; docs/benchmarks.md has their formats, prompts and rules."""
