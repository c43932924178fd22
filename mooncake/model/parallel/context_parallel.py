"""Context parallelism: one prompt over several processes, each with the whole model and part of a step's tokens.

The first rank is the engine's model. It alone owns the paged cache, so everything else that happens to sequences
(decode steps, copies, loads from the pool, hand-offs) does not involve the other ranks, which keep nothing between two
steps. It also computes steps with few new tokens alone. Otherwise it sends the step to all ranks; each computes its
tokens through all layers, and ranks communicate only in attention (``context_attention``). Before each layer the first
rank signals whether the step goes on, so that a step abandoned by its hook ends on all ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import msgspec
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import ModelError
from mooncake.kernels import choose_kernels
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model
from mooncake.model.parallel.context_attention import ContextAttention, needs_whole_contexts
from mooncake.model.parallel.context_home import Home
from mooncake.model.parallel.context_plan import LEAST_TOKENS, ContextPlan, Ints, Method, Shape
from mooncake.model.parallel.context_post import Broken, GroupPost, RankReport, breaking
from mooncake.model.parallel.ranks import (
    Group,
    StepAbandoned,
    Workers,
    batch_arrays,
    batch_of,
    find_store,
    leave_group,
    live_with_first,
    rank_threads,
    starting,
)
from mooncake.precision import WeightFormat
from mooncake.types import KVLayout

log = logging.getLogger(__name__)

_STEP = 0  # the only kind of message


class Setup(msgspec.Struct, frozen=True):
    """What all ranks must know; the other ranks get it on their command line."""

    size: int
    model: str  # as for ``open_checkpoint``, like the next field
    max_model_len: int
    positions: int  # maximum length of a sequence: that of the RoPE tables
    weights: WeightFormat
    kv_dtype: str
    threads: int  # per rank
    method: Method | None = None  # None: by bytes sent
    least_tokens: int = LEAST_TOKENS  # sequences with fewer new tokens are not split


@dataclass(frozen=True, slots=True)
class StepReport:
    methods: tuple[Method, ...]  # by layer
    ranks: tuple[RankReport, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(rank.sent_bytes for rank in self.ranks)


class ContextParallelModel:
    """``engine.CausalModel`` over ``setup.size`` processes. Close it; otherwise the other ranks end when it is
    collected.

    The first rank computes batches with adapters, reuse or hidden states alone.
    """

    def __init__(self, model: CausalLM | Decoder, setup: Setup, checkpoint: Checkpoint) -> None:
        """``model`` is the first rank's, from ``checkpoint``, and matches ``setup``. Raises ModelError if its prompts
        cannot be split this way or a rank cannot load it, ConfigError for a second one in this process, NodeUnavailable
        if a rank dies as it starts."""
        check_can_cut(checkpoint, setup)
        self.config = model.config
        self.report: StepReport | None = None  # of the last step that all ranks computed
        self._model, self._setup = model, setup
        self.workers = Workers("context parallel ranks", leave_group)
        port, given = self.workers.open_store(), msgspec.json.encode(setup).decode()
        try:
            for rank in range(1, setup.size):
                self.workers.start("mooncake.model.parallel.context_parallel", [given, rank, port])
            self._rank = _Rank(model, setup, self.workers.join(setup.size), checkpoint)
            self.workers.await_ready()
        except BaseException:
            self.workers.end()
            raise

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``. Raises NodeUnavailable when a rank has died. After that, or after an interrupt, the
        first rank computes later steps alone."""
        is_for_one = batch.adapters is not None or batch.reuse is not None or batch.hidden is not None
        if is_for_one or not self.workers.are_alive:
            return self._model.forward(batch, cache, hook)
        plan = self._rank.plan(batch)
        if not plan.num_cut:
            return self._model.forward(batch, cache, hook)
        try:
            return self._together(plan, batch, cache, hook)
        except Broken as broken:
            error = self.workers.failed(broken)
            self.workers.end()
            log.error("%s; from now on the first rank computes alone", error.message)
            raise error from broken.__cause__
        except Exception:
            raise
        except BaseException:  # an interrupt, between any two messages: those in flight would reach the next step
            self.workers.end()
            raise

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self.workers.stop()

    def _together(self, plan: ContextPlan, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        rank = self._rank
        with breaking():
            rank.group.send(_STEP, *batch_arrays(batch))
        try:
            with rank_threads(self._setup.threads):
                own = rank.compute(plan, batch, hook, Home(plan, batch, cache))
        except Broken:
            raise
        except Exception:  # raised by the hook, or by a bad batch: between layers, where the others wait for a signal
            rank.post.signal(goes_on=False)
            raise
        rank.post.signal(goes_on=True)
        logits = own.new_empty((len(batch.logit_rows), own.shape[1]))
        reports = [rank.post.report()]
        for other in range(plan.size):
            places, rows = _logit_rows(plan, batch, other)
            if other:
                logits[places], report = rank.post.answer_of(other, len(rows), own.shape[1])
                reports.append(report)
            else:
                logits[places] = own
        self.report = StepReport(rank.methods, tuple(reports))
        return logits


def check_can_cut(checkpoint: Checkpoint, setup: Setup) -> None:
    """Raises ModelError if the model's prompts cannot be split over this many ranks this way."""
    config = checkpoint.config
    by_heads = any(needs_whole_contexts(config, layer) for layer in range(config.num_layers))
    shape = shape_of(checkpoint, setup)
    if config.gemma:
        raise ModelError(f"context parallel ranks are not for Gemma 3n and 4, and so not for {checkpoint.name}")
    if config.kv_sources:
        raise ModelError(f"{checkpoint.name} shares KV between layers, which context parallel ranks do not support")
    if by_heads and setup.method not in (None, Method.HEADS):
        what = "layers with ALiBi" if config.alibi_slopes else "layers with a sliding window"
        raise ModelError(f"{what} go by heads over context parallel ranks, not by {setup.method}")
    if (by_heads or setup.method is Method.HEADS) and not shape.can_part_heads(setup.size):
        what = f"{config.num_heads} heads over {config.num_kv_heads} KV heads cannot be parted among {setup.size} ranks"
        raise ModelError(what + (", which a sliding window or ALiBi needs" if by_heads else ""))


def shape_of(checkpoint: Checkpoint, setup: Setup) -> Shape:
    config, layout = checkpoint.config, checkpoint.kv_layout(1, setup.kv_dtype)
    return Shape(config.num_heads, config.num_kv_heads, config.head_dim, layout.row_bytes, layout.num_kinds)


class _Rank:
    """One of the ranks: its model, and its connection to the others."""

    def __init__(self, model: CausalLM | Decoder, setup: Setup, group: Group, checkpoint: Checkpoint) -> None:
        self.group = group
        self.post = GroupPost(group.rank, setup.size)
        self._attention: ContextAttention | None = None  # of the last step
        self._model, self._setup = model, setup
        self._layout = checkpoint.kv_layout(1, setup.kv_dtype)
        self._shape = shape_of(checkpoint, setup)

    def plan(self, batch: ForwardBatch) -> ContextPlan:
        starts, lengths = (values.numpy().astype("int64") for values in (batch.query_starts, batch.context_lens))
        return ContextPlan.of(self._setup.size, starts, lengths, self._setup.least_tokens)

    def compute(self, plan: ContextPlan, batch: ForwardBatch, hook: LayerHook, home: Home | None) -> torch.Tensor:
        """Logits of the rank's rows. On the first rank, the hook is called for a layer once the cache has all of it."""
        rank, config = self.post.rank, self._model.config
        self.post.begin()
        rows = torch.from_numpy(plan.rows_of(rank))
        own = _room_for(self._layout, len(rows))
        self._attention = attention = ContextAttention(
            plan, self.post, choose_kernels(), config, self._shape, own, self._setup.method, home
        )
        mine = ForwardBatch.of_prompt(batch.tokens[rows], 1, torch.from_numpy(_logit_rows(plan, batch, rank)[1]))
        mine = replace(mine, positions=batch.positions[rows])
        told = _RankPass(hook, self.post, attention, is_first=home is not None)
        return self._model.forward(mine, _as_cache(own, config.num_layers), told, attention=told.attend)

    @property
    def methods(self) -> tuple[Method, ...]:
        """By layer, for the last step."""
        assert self._attention is not None
        return tuple(self._attention.method_of(layer) for layer in range(self._model.config.num_layers))


class _RankPass:
    """The hook and the attention of a rank's pass; between the two, ranks wait for each other."""

    def __init__(self, hook: LayerHook, post: GroupPost, attention: ContextAttention, *, is_first: bool) -> None:
        self.wants_layers = hook.wants_layers
        self.before_layer = hook.before_layer
        self._hook, self._post, self._attention, self._is_first = hook, post, attention, is_first

    def after_layer(self, layer: int) -> None:
        """The rank's own tokens are written; those of other ranks have not arrived."""

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_first:
            self._post.signal(goes_on=True)
        elif not self._post.await_signal():
            raise StepAbandoned
        try:
            mixed = self._attention(layer, query, sinks)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"a rank failed amid attention: {error}") from error
        if self.wants_layers:
            self._hook.after_layer(layer)
        return mixed


def _room_for(layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """Room for one layer's keys and values, ``[K|V, Hkv, tokens, row width]``."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    shape = (layout.num_kinds, layout.num_kv_heads, num_tokens, layout.row_bytes // layout.itemsize)
    return torch.empty(shape, dtype=dtype)


def _as_cache(own: torch.Tensor, num_layers: int) -> torch.Tensor:
    """The same memory as a paged cache with blocks of one token, in which all layers share one place."""
    num_kinds, num_heads, count, width = own.shape
    kind, head, token, _ = own.stride()
    return own.as_strided((count, num_layers, num_kinds, num_heads, 1, width), (token, 0, kind, head, width, 1))


def _logit_rows(plan: ContextPlan, batch: ForwardBatch, rank: int) -> tuple[Ints, Ints]:
    """Which of the step's logits come from ``rank``, and from which of its rows."""
    wanted = batch.logit_rows.numpy()
    rows = plan.rows_of(rank)
    order = rows.argsort()
    places = order[rows[order].searchsorted(wanted).clip(max=len(rows) - 1)]
    is_here = rows[places] == wanted
    return is_here.nonzero()[0], places[is_here]


def _serve(rank: _Rank) -> NoReturn:
    while True:
        with breaking():
            _, arrays = rank.group.receive()
        batch = batch_of(arrays)
        try:
            logits = rank.compute(rank.plan(batch), batch, NoHook(), None)
        except StepAbandoned:
            continue
        except Broken:
            raise
        except Exception:  # a faulty step fails on the first rank too, which reports it
            if rank.post.await_signal():
                raise
            continue
        if rank.post.await_signal():
            rank.post.answer(logits)


def main(argv: Sequence[str]) -> None:
    """Run another rank until the first one stops it or dies."""
    live_with_first()
    setup = msgspec.json.decode(argv[0], type=Setup)
    index, port = int(argv[1]), int(argv[2])
    torch.set_num_threads(setup.threads)
    try:
        with starting():
            group = Group(index, setup.size, find_store(port))
            checkpoint = open_checkpoint(setup.model, setup.max_model_len)
            model = load_model(checkpoint, setup.weights, setup.positions)
            rank = _Rank(model, setup, group, checkpoint)
        _serve(rank)
    except Broken as error:  # another rank is gone, so this step is lost
        log.warning("a context parallel rank ends: %s", error)
    finally:
        leave_group()


if __name__ == "__main__":
    main(sys.argv[1:])
