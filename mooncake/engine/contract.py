"""The engine's interfaces: what it needs (model, cache, hook), its configuration, and what it returns.

Only types, no implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, cast, runtime_checkable

import msgspec
import torch

from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import ConfigError, KVLoadFailed, shown
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.gpu.device_sampler import Draws
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.pooling import Vector
from mooncake.types import FinishReason, SampledToken, TokenLogprob


class HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class CausalModel(Protocol):
    """What the engine needs of a model (``mooncake.model``)."""

    @property
    def config(self) -> HasVocabulary: ...

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """Float32 logits [R, V] of the batch's logit rows. Raises what the hook raises."""
        ...


@runtime_checkable
class RecomputingModel(CausalModel, Protocol):
    """A model that can also compute some of its layers alone."""

    def recompute(
        self, layers: range, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook, hidden: torch.Tensor | None
    ) -> None:
        """Keys and values of adjacent ``layers``, from the input of the first of them (float32 [T, hidden]; None:
        the embeddings, for layer 0). Raises what the hook raises."""
        ...


@runtime_checkable
class HiddenStateModel(CausalModel, Protocol):
    """A model that can also give the last hidden states of tokens (``ForwardBatch.hidden``), from which embeddings are
    pooled. Rows of its logits beyond those that are wanted mean nothing."""

    @property
    def hidden_size(self) -> int:
        """0: it cannot give them."""
        ...


class StartedStep(Protocol):
    """A step that may still be running."""

    def tokens(self) -> list[int]:
        """Each row's token, -1 where its logits are not finite. Waits for this step only."""
        ...


@runtime_checkable
class AsyncModel(CausalModel, Protocol):
    """A model that can also start a step and return its tokens later: meanwhile the host prepares the next step, and
    starts it too. Steps are computed in the order they are started, and before any later ``forward``."""

    @property
    def max_async_sequences(self) -> int:
        """Maximum sequences of a started step; 0: it cannot start steps."""
        ...

    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Rows[int] | None = None
    ) -> StartedStep:
        """Start a step of one token per sequence, which also draws the next one, by ``draws`` or greedily.

        The arrays may be reused after it returns. ``newest`` has, for tokens that the batch does not know yet, the row
        of the previous started step that draws them; -1 for known ones.
        """
        ...


class Cache(Protocol):
    """What the engine needs of a paged cache. Blocks are numbered from 0, followed by the places of the swap space."""

    num_blocks: int
    num_places: int

    @property
    def tensor(self) -> torch.Tensor:
        """The argument of ``CausalModel.forward``."""
        ...

    def copy_block(self, source: int, target: int) -> None: ...


class StepHook(LayerHook, Protocol):
    """Callbacks around steps, on the engine's thread.

    A KVLoadFailed from any method but ``end_step`` abandons the step: no sequence advances.
    """

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        """The sequence has its blocks. Those ``to_load`` must be filled before their layers are read, and so must the
        sequence's pages of the same blocks in other groups of layers. Called once per admission, even when there is
        nothing to load."""

    def begin_step(self, plan: StepPlan) -> None:
        """The step's first layer is next. Called again for the same sequences after an abandoned step.

        A step of decodes may already be running, if the hook had nothing to do between the layers of the previous one.
        """

    def end_step(self, plan: StepPlan) -> None:
        """The step's tokens and KV are valid; full blocks are sealed. Sequences that end here still have their
        blocks."""


class _NoStepHook(NoHook):
    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        if to_load:
            raise KVLoadFailed("there is nothing to load blocks with", (sequence.request_id,))

    def begin_step(self, plan: StepPlan) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        pass


NO_HOOK: StepHook = _NoStepHook()


_LEAST = {
    **dict.fromkeys(("block_tokens", "max_sequences", "max_model_len", "max_waiting"), 1),
    **dict.fromkeys(("chunk_tokens", "tbt_limit_ms", "speculative_tokens"), 0),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. Raises ConfigError for invalid numbers."""

    block_tokens: int = 64
    chunk_tokens: int = 256  # maximum prompt tokens per step; 0: whole prompts
    max_sequences: int = 64  # running at once
    max_model_len: int = 2048  # tokens of prompt and answer
    max_waiting: int = 1024  # sequences; more are refused
    tbt_limit_ms: float = 0.0  # prompts are cut so that steps with decodes take less; 0: by chunk_tokens alone
    speculative_tokens: int = 0  # maximum draft tokens per sequence and step; 0: none
    keep_events: bool = True  # whether someone takes the block pool's events
    own_layers: range | None = None  # the layers recomputed for tokens with another model's KV; None: no such tokens
    groups: PageGroups = UNIFORM  # of the cache's layers

    @property
    def max_step_tokens(self) -> int:
        """Maximum prompt tokens of one step."""
        return self.chunk_tokens or self.max_model_len

    def __post_init__(self) -> None:
        check_least({name: (getattr(self, name), least) for name, least in _LEAST.items()})
        if self.tbt_limit_ms and not self.chunk_tokens:
            raise ConfigError("tbt_limit_ms cuts prompts, and chunk_tokens = 0 says that none is cut: set one of them")
        if self.speculative_tokens and self.groups.has_states:
            raise ConfigError("speculative_tokens is not for models with recurrent layers: no state takes a token back")


def check_least(numbers: Mapping[str, tuple[object, float]]) -> None:
    """Takes each value and its minimum, by name. Raises ConfigError."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, Real):
            raise ConfigError(f"{name} must be a number, got {shown(value)}")
        if not least <= cast(float, value) < math.inf:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


class StepOutput(msgspec.Struct, frozen=True):
    """A new token of answer ``choice`` to a request. ``finish_reason`` is set on the last one. Of a sequence that is
    pooled this is the only one, and its ``token`` means nothing."""

    request_id: str
    token: SampledToken
    finish_reason: FinishReason | None
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with the first token: all prompt tokens but the first
    pooled: Vector | None = None  # hidden states [hidden], as they are


@dataclass(frozen=True, slots=True)
class Reservation:
    """``block_ids`` are to be filled with the sequence's blocks ``first_block``, ``first_block + 1``, …: with the
    pages of the first group of layers, then those of the next (``PageGroups.spans_behind``)."""

    first_block: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int  # sequences
    waiting: int
    waiting_tokens: int  # prompt tokens not computed yet
    context_tokens: int  # of running sequences
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    preemptions: int  # since the start, like all that follow
    swapped_blocks: int  # kept for preempted sequences
    forks: int  # sequences that started with another one's blocks
    shared_blocks: int  # full blocks that forks did not need twice
    copied_blocks: int  # copies on write
    computed_tokens: int  # computed by the model
    inherited_tokens: int  # those with another model's KV, of which only some layers were computed
    blended_tokens: int  # computed tokens that had reusable KV, so that most left the pass after its first layers
    drafted_tokens: int  # proposed by speculation
    accepted_tokens: int  # of those, the right ones
