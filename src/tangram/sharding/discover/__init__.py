"""Discovery of op rules: run an operator on cut inputs, and write down what held.

cuts     which dims of a call can be cut together, and what becomes of the results
draft    one line for what was found in calls of different shapes
settle   the line proved; what is refuted taken back; notes added that hold
draw     calls of operators that torch has no samples of
"""

from typing import TYPE_CHECKING

from tangram.lazy import lazily

__all__ = ["Proposal", "calls_from", "calls_to_prove", "discover", "drawn_calls", "operator_of", "own_calls", "propose"]

# Lazily: proofs load torch's database of operators, which starts threads, and whoever only reads rules forks ranks.
if TYPE_CHECKING:
    from tangram.sharding.discover.propose import Proposal, discover, propose
    from tangram.sharding.discover.sample_calls import calls_from, calls_to_prove, drawn_calls, operator_of, own_calls
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tangram.sharding.discover.propose": ["Proposal", "discover", "propose"],
            "tangram.sharding.discover.sample_calls": [
                "calls_from",
                "drawn_calls",
                "calls_to_prove",
                "operator_of",
                "own_calls",
            ],
        },
    )
