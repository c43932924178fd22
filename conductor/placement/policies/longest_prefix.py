"""The longest match wins, whatever its queue. It herds: prompts that share a first block all go to one node."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, idlest_decode
from conductor.placement.view import Choice, PlacementQuery


def longest_prefix(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    return Choice(any_least(allowed(query, -query.host_runs()), rng), idlest_decode(query))
