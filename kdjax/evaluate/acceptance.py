"""How many tokens a verify pass commits, as records and metrics."""

from __future__ import annotations

from kdjax.decode import Completion
from kdjax.evaluate.loops import is_loop
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric

TAU = {
    "tau_micro": Metric(
        total="emitted", per="rounds", definition="tokens per verify pass over all passes, bonus token included"
    ),
    "tau_macro": Metric(total="tau", definition="mean over prompts of each prompt's own tau, bonus token included"),
}


def acceptance_record(name: str, completion: Completion) -> Record:
    statistics = completion.statistics
    record: Record = {
        "unit": name,
        "rounds": statistics.rounds,
        "emitted": statistics.emitted,
        "accepted_by_depth": list(statistics.accepted_by_depth),
        "loops": is_loop(completion.token_ids),
        "token_ids": list(completion.token_ids),
    }
    return record | ({"tau": statistics.tau} if statistics.rounds else {})
