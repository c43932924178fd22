"""TTFT of a receiver that reads a sender's KV: two live clusters around the sender's pool.

Both have the weights of one model, since the time does not depend on them. Their blocks still have different names,
because the sender keeps hidden states.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import Checkpoint
from mooncake.client import Client
from mooncake.config import BlockSection, Config, load_config
from mooncake.errors import InternalError
from mooncake.rpc import cluster_pb2
from mooncake.sampling_params import SamplingParams
from mooncake.types import Role
from mooncake.variants import Profile, write_profile

FULL, INPUTS_FIRST, KV_FIRST = "full prefill", "hidden states, then KV", "KV, then hidden states"
TAIL = 32  # tokens after the prefix
SETTLE_S, POLL_S = 30.0, 0.05  # limit for a node's counters to be updated, and interval of polling
TWO_TOKENS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)  # one would not reach the decode node


@dataclass(frozen=True, slots=True)
class Serving:
    layers: range
    prefix_tokens: int
    repeat: int
    link_mb_per_s: float  # 0: shared memory
    threads: int


async def first_tokens(
    model: str, checkpoint: Checkpoint, layers: range, serving: Serving, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds of each way. Prompts that the sender has computed alternate with new ones. Raises MooncakeError."""
    keeps = (layers[0],) if layers[0] else ()
    prompts = _prompts(checkpoint, serving.prefix_tokens + TAIL)
    times: dict[str, list[float]] = {FULL: []}
    link = ['transfer.transports=["tcp"]', f"transfer.max_mb_per_s={serving.link_mb_per_s}"]
    link = link if serving.link_mb_per_s else []
    with tempfile.TemporaryDirectory() as folder:
        tell("starting the sender")
        async with LocalCluster(_config(model, serving, f"model.keep_hidden={list(keeps)}", *link)) as sender:
            with Client(sender.grpc_address) as client:
                pool = _nodes(client, Role.STORE)[0].info.control_address
            for name, inputs_first in ((INPUTS_FIRST, True), (KV_FIRST, False)):
                file, content = Path(folder, "profile.json"), checkpoint.digest
                write_profile(file, Profile(content, content, layers[0], layers[-1], keeps, inputs_first=inputs_first))
                tell(f"starting the receiver: {name}")
                variant = (f"prefill.variant={file}", f'prefill.variant_pools=["{pool}"]')
                async with LocalCluster(_config(model, serving, *variant)) as receiver:
                    addresses = sender.grpc_address, receiver.grpc_address
                    full_ms, inherited_ms = await asyncio.to_thread(_play, *addresses, prompts, serving, tell)
                times[FULL] += full_ms
                times[name] = inherited_ms
    return times


def _play(
    sender: str, receiver: str, prompts: Iterator[list[int]], serving: Serving, tell: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Milliseconds of prompts computed in full, and of inherited ones. Raises InternalError when those were not
    inherited."""
    full_ms, inherited_ms = [], []
    with Client(sender) as theirs, Client(receiver) as ours:
        for turn in range(serving.repeat + 1):
            tell(f"{turn} of {serving.repeat} timings")
            unknown, known = next(prompts), next(prompts)
            _leave(theirs, known, serving.prefix_tokens)
            full_ms.append(_first_token_ms(ours, unknown))
            inherited_ms.append(_first_token_ms(ours, known))
        wanted = (serving.repeat + 1) * serving.prefix_tokens
        _until(lambda: _counter(ours, "tokens_inherited") >= wanted, f"{wanted} tokens were not inherited")
    return full_ms[1:], inherited_ms[1:]  # the first ones are a warm-up


def _leave(client: Client, prompt: list[int], prefix_tokens: int) -> None:
    """Have the sender compute a prompt, and wait until its pool has the prefix."""

    def num_stored() -> int:
        return _nodes(client, Role.STORE)[0].load.counters["stored"]

    wanted = num_stored() + prefix_tokens // BlockSection().tokens
    for _ in client.stream(token_ids=prompt, sampling=TWO_TOKENS):
        pass
    _until(lambda: num_stored() >= wanted, "the sender's pool did not take the prefix")


def _until(is_so: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + SETTLE_S
    while not is_so():
        if time.monotonic() > end_s:
            raise InternalError(otherwise)
        time.sleep(POLL_S)


def _counter(client: Client, name: str) -> int:
    return sum(node.load.counters[name] for node in _nodes(client, Role.PREFILL))


def _config(model: str, serving: Serving, *more: str) -> Config:
    return load_config(
        None,
        [
            f"model.path={model}",
            "conductor.http_port=0",
            "conductor.grpc_port=0",
            "conductor.heartbeat_interval_s=0.2",
            "conductor.max_tail_tokens=0",
            f"prefill.threads={serving.threads}",
            "decode.threads=1",
            "prefill.kv_gb=0.4",
            "prefill.swap_gb=0",
            "decode.kv_gb=0.4",
            "decode.swap_gb=0",
            "store.dram_gb=0.5",
            *more,
        ],
    )


def _prompts(checkpoint: Checkpoint, length: int) -> Iterator[list[int]]:
    random = np.random.default_rng(0)
    while True:
        yield random.integers(1000, checkpoint.config.vocab_size - 1000, length).tolist()


def _first_token_ms(client: Client, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    chunks = client.stream(token_ids=prompt, sampling=TWO_TOKENS)
    next(chunks)
    elapsed_s = time.perf_counter() - started_s
    for _ in chunks:
        pass
    return elapsed_s * 1e3


def _nodes(client: Client, role: Role) -> list[cluster_pb2.NodeStatus]:
    return [node for node in client.status().nodes if node.info.role == role]
