"""Hit rates of eviction policies over a recorded trace, in caches of several sizes.

Pure: one cache, requests one after the other in the order of the trace, the policies of the pool. A hit is a block of
the longest cached prefix of a prompt; after a prompt was served all of its blocks are stored, and no generated ones. It
must not know about files, processes or the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.eviction import POLICIES, Block, EvictionPolicy, make_policy
from kvstore.eviction.ranked import Belady, reads_of
from mooncake.errors import ConfigError
from mooncake.trace import TRACE_BLOCK_TOKENS, HitCount, TraceRequest

BELADY = "belady"
LAB_POLICIES = (*POLICIES, BELADY)
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)  # blocks, as in the published analyses
PROGRESS_EVERY = 256  # requests


class Rules(StrEnum):
    """How a cache is used around its policy; results under different rules cannot be compared."""

    POOL = "pool"  # leaves are evicted before their parents; a whole prompt is stored, then the excess is evicted
    TAIL_FIRST = "tail-first"  # any block can be evicted, for one new block at a time, a prompt's last block first
    HEAD_FIRST = "head-first"  # the same with a prompt's first block first


@dataclass(frozen=True, slots=True)
class Rates:
    """Hit rates of one policy in one cache. The definitions differ by percents: always name the one used."""

    block: float
    token: float
    request_mean: float
    second_half_block: float  # of the second half of the requests, which no policy may be tuned on

    @staticmethod
    def of(whole: HitCount, first_half: HitCount) -> Rates:
        later_blocks = whole.blocks - first_half.blocks
        later_hits = whole.hit_blocks - first_half.hit_blocks
        return Rates(whole.block_rate, whole.token_rate, whole.request_mean_rate, later_hits / max(1, later_blocks))


class Lab:
    """A trace prepared to be served many times."""

    def __init__(self, trace: Sequence[TraceRequest], rules: Rules = Rules.POOL) -> None:
        self._trace = trace
        self._rules = rules
        self._chains = _chains(trace, has_parents=rules is Rules.POOL)
        self._reads = reads_of(request.hash_ids for request in trace)

    def run(self, policy_name: str, capacity_blocks: int, progress: Callable[[int], None] = lambda done: None) -> Rates:
        """``progress`` is called now and then with the number of requests served. Raises ConfigError for an unknown
        policy."""
        if policy_name not in LAB_POLICIES:
            raise ConfigError(f"no policy is called {policy_name!r}; there are: {', '.join(LAB_POLICIES)}")
        knows_the_future = policy_name == BELADY
        policy: EvictionPolicy
        if knows_the_future:
            policy = Belady(self._reads)
        else:
            policy = make_policy(policy_name, capacity_blocks, TRACE_BLOCK_TOKENS)
        store = _store_whole if self._rules is Rules.POOL else _store_one_by_one
        half = len(self._trace) // 2
        count = first_half = HitCount()
        for number, (request, chain) in enumerate(zip(self._trace, self._chains, strict=True)):
            if number == half:
                first_half = count
            if number % PROGRESS_EVERY == 0:
                progress(number)
            now = number if knows_the_future else request.timestamp_ms / 1000
            hit = _leading_run(policy, request.hash_ids)
            hit_tokens = min(hit * TRACE_BLOCK_TOKENS, request.input_length)
            count = count.plus(len(chain), hit, request.input_length, hit_tokens)
            store(policy, chain if self._rules is Rules.HEAD_FIRST else reversed(chain), capacity_blocks, now)
        return Rates.of(count, first_half)


def _chains(trace: Sequence[TraceRequest], has_parents: bool) -> list[tuple[Block, ...]]:
    """Each request's blocks. Without parents every block is a leaf."""
    known: dict[int, Block] = {}
    chains = []
    for request in trace:
        parent: int | None = None
        chain = []
        for position, key in enumerate(request.hash_ids):
            block = known.get(key)
            if block is None:
                block = Block(key, parent if has_parents else None, position, 1, len(request.hash_ids))
                known[key] = block
            chain.append(block)
            parent = key
        chains.append(tuple(chain))
    return chains


def _leading_run(policy: EvictionPolicy, keys: Sequence[int]) -> int:
    return next((index for index, key in enumerate(keys) if key not in policy), len(keys))


def _store_whole(policy: EvictionPolicy, blocks: Iterable[Block], capacity_blocks: int, now: float) -> None:
    for block in blocks:
        policy.insert(block, now)
    for _ in range(len(policy) - capacity_blocks):
        policy.victim(now)


def _store_one_by_one(policy: EvictionPolicy, blocks: Iterable[Block], capacity_blocks: int, now: float) -> None:
    for block in blocks:
        if len(policy) >= capacity_blocks and block.key not in policy:
            policy.victim(now)
        policy.insert(block, now)
