"""What a node measures of its engine's steps: the input of the conductor's cost model, taken around its role's hook."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from mooncake.engine.contract import StepHook
from mooncake.engine.step_plan import StepPlan
from mooncake.model.batch import PieceHook
from mooncake.rpc import cluster_pb2 as pb

MAX_SAMPLES = 256  # measured steps kept between two heartbeats


class StepSamples:
    """Measured steps since the last report: the input of the conductor's cost model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill: deque[pb.PrefillSample] = deque(maxlen=MAX_SAMPLES)
        self._decode: deque[pb.DecodeSample] = deque(maxlen=MAX_SAMPLES)
        self._transfer: deque[pb.TransferSample] = deque(maxlen=MAX_SAMPLES)

    def add_step(self, plan: StepPlan, elapsed_ms: float) -> None:
        """A step counts if it is of one kind: a single prefill chunk, or decodes only."""
        chunks = plan.entries
        if plan.variant_entries or any(chunk.num_draft or chunk.sequence.reused.blend is not None for chunk in chunks):
            return
        if len(chunks) == 1 and chunks[0].num_tokens > 1:
            sample = pb.PrefillSample(new_tokens=chunks[0].num_tokens, prefix_tokens=chunks[0].first, ms=elapsed_ms)
            with self._lock:
                self._prefill.append(sample)
        elif chunks and all(chunk.num_tokens == 1 for chunk in chunks):
            context = sum(chunk.first + 1 for chunk in chunks)
            with self._lock:
                self._decode.append(pb.DecodeSample(batch=len(chunks), context_tokens=context, ms=elapsed_ms))

    def add_transfer(self, peer: str, transport: str, num_bytes: int, elapsed_ms: float) -> None:
        with self._lock:
            self._transfer.append(pb.TransferSample(peer=peer, transport=transport, bytes=num_bytes, ms=elapsed_ms))

    def take(self) -> pb.CostSamples:
        with self._lock:
            samples = pb.CostSamples(prefill=self._prefill, decode=self._decode, transfer=self._transfer)
            for kept in (self._prefill, self._decode, self._transfer):
                kept.clear()
        return samples


class NodeHook:
    """A role's hook, with step times and block events published around it."""

    def __init__(self, inner: StepHook, samples: StepSamples, publish: Callable[[], None]) -> None:
        self.admitted = inner.admitted
        self.before_layer = inner.before_layer
        self.num_layers = 0  # layers reached by steps, in total
        self.computed_prompts = False  # in the last step
        self._inner = inner
        self._samples = samples
        self._publish = publish
        self._started_s = 0.0

    @property
    def wants_layers(self) -> bool:
        return self._inner.wants_layers

    def after_layer(self, layer: int) -> None:
        self.num_layers += 1
        self._inner.after_layer(layer)

    def after_piece(self, layer: int, num_tokens: int) -> None:
        if isinstance(self._inner, PieceHook):
            self._inner.after_piece(layer, num_tokens)

    def begin_step(self, plan: StepPlan) -> None:
        self._started_s = time.monotonic()
        self._inner.begin_step(plan)

    def end_step(self, plan: StepPlan) -> None:
        self._samples.add_step(plan, (time.monotonic() - self._started_s) * 1e3)
        self.computed_prompts = any(entry.num_tokens > 1 + entry.num_draft for entry in plan.entries)
        self._inner.end_step(plan)
        self._publish()
