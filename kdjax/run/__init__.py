"""The folder a run leaves behind: resolved config, provenance, metrics, summary."""

from kdjax.run.folder import RunFolder as RunFolder
from kdjax.run.provenance import provenance as provenance
