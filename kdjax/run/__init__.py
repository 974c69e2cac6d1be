"""The folder a run leaves behind, and the runner of experiments: sweeps, metrics, summary, comparison."""

from kdjax.run.folder import RunFolder as RunFolder
from kdjax.run.provenance import provenance as provenance
