"""Placement policies: each one pure function ``(query, rng) -> Choice``.

The published ones are as published; each file says how it fills what the publication leaves open. They use milliseconds
measured here only if their own formula does, and fetch from other hosts only if theirs does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conductor.placement.policies.aibrix import aibrix
from conductor.placement.policies.algorithm_1 import algorithm_1
from conductor.placement.policies.baselines import (
    least_loaded,
    local_cache_aware,
    longest_prefix,
    random,
    round_robin,
)
from conductor.placement.policies.dynamo import dynamo
from conductor.placement.policies.llm_d import llm_d
from conductor.placement.policies.lmetric import lmetric
from conductor.placement.policies.milliseconds import milliseconds
from conductor.placement.policies.production_stack import production_stack, production_stack_load
from conductor.placement.policies.sglang import sglang
from conductor.placement.view import Choice, PlacementQuery

Policy = Callable[[PlacementQuery, np.random.Generator], Choice]

DEFAULT_POLICY = "milliseconds"
POLICIES: dict[str, Policy] = {
    "milliseconds": milliseconds,
    "algorithm_1": algorithm_1,
    "local_cache_aware": local_cache_aware,
    "longest_prefix": longest_prefix,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": random,
    "lmetric": lmetric,
    "dynamo": dynamo,
    "llm_d": llm_d,
    "sglang": sglang,
    "aibrix": aibrix,
    "production_stack": production_stack,
    "production_stack_load": production_stack_load,
}
