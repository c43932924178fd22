"""Two variants of one model compared: the receiver's output when the KV of some layers is the sender's.

Prompts have a prefix of whole blocks, which is inherited, and a tail that the receiver computes in full. Everything
goes through the model's own passes over paged caches, as in serving. Each run of adjacent layers that is recomputed
starts from the hidden states that the sender's first of these layers had as its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model import CausalLM, ForwardBatch, NoHook
from mooncake.model.kept_inputs import input_rows
from mooncake.types import KVLayout


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    num_compared: int  # number of last tokens whose next-token distributions are compared


def every_input(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the sender keeps, so that a group may begin at any layer."""
    return tuple(range(1, num_layers))


class Comparison:
    """Outputs of the receiver for some prompts, with any layers recomputed."""

    def __init__(self, sender: CausalLM, receiver: CausalLM, layout: KVLayout, prompts: Sequence[Prompt]) -> None:
        """``sender`` keeps ``every_input``, and ``layout`` has room for these; the receiver's pages are the same
        without them."""
        self.num_layers = layout.kv_layers.stop
        self._sender, self._receiver = sender, receiver
        self._size = layout.block_tokens
        self._prompts = prompts
        self._most_blocks = max(-(-len(prompt.tokens) // self._size) for prompt in prompts)
        self._theirs = KVCache(layout, self._most_blocks * len(prompts)).tensor
        plain = KVLayout(self.num_layers, layout.num_kv_heads, layout.block_tokens, layout.head_dim, layout.dtype)
        self._ours = KVCache(plain, self._most_blocks * len(prompts)).tensor
        self._mixed = KVCache(plain, self._most_blocks * len(prompts)).tensor
        sender.forward(self._batch(is_prefix=True), self._theirs, NoHook())

    @property
    def inherited_tokens(self) -> int:
        return sum(map(self._border, self._prompts))

    def full(self) -> torch.Tensor:
        """Float32 next-token log-probabilities ``[R, V]`` of the compared tokens, with nothing inherited."""
        self._receiver.forward(self._batch(is_prefix=True), self._ours, NoHook())
        return self._tails(self._receiver, self._ours)

    def sender_alone(self) -> torch.Tensor:
        """The same from the sender."""
        return self._tails(self._sender, self._theirs)

    def computed_anew(self, layers: Iterable[int]) -> torch.Tensor:
        """The same with ``layers`` recomputed and the sender's KV in all others."""
        self._mixed.copy_(self._theirs[:, : self.num_layers])
        for run in runs(layers):
            self._recompute(run)
            self._mixed[:, run.start : run.stop] = self._ours[:, run.start : run.stop]
        return self._tails(self._receiver, self._mixed)

    def groups(self, first: int, lasts: Sequence[int]) -> Iterator[tuple[range, torch.Tensor]]:
        """The same for each group from layer ``first`` to one of ``lasts``; one pass recomputes the layers of all."""
        self._recompute(range(first, max(lasts) + 1))
        self._mixed.copy_(self._theirs[:, : self.num_layers])
        done = first
        for last in sorted(lasts):
            self._mixed[:, done : last + 1] = self._ours[:, done : last + 1]
            done = last + 1
            yield range(first, last + 1), self._tails(self._receiver, self._mixed)

    def _recompute(self, layers: range) -> None:
        batch, hidden = self._batch(is_prefix=True), None
        if layers[0]:
            rows = input_rows(self._theirs, self.num_layers, layers[0] - 1, self._receiver.config.hidden_size)
            hidden = rows[batch.slots // self._size, batch.slots % self._size].float()
        self._receiver.recompute(layers, batch, self._ours, NoHook(), hidden)

    def _tails(self, model: CausalLM, cache: torch.Tensor) -> torch.Tensor:
        return model.forward(self._batch(is_prefix=False), cache, NoHook()).log_softmax(-1)

    def _border(self, prompt: Prompt) -> int:
        """Tokens in whole blocks before the compared ones."""
        return (len(prompt.tokens) - prompt.num_compared) // self._size * self._size

    def _batch(self, *, is_prefix: bool) -> ForwardBatch:
        """A batch of all prompts, each up to its border or from there on."""
        tokens, positions, slots, starts, contexts, rows = [], [], [], [0], [], []
        for index, prompt in enumerate(self._prompts):
            border, length = self._border(prompt), len(prompt.tokens)
            first, end = (0, border) if is_prefix else (border, length)
            places = torch.arange(first, end)
            tokens.append(torch.tensor(prompt.tokens[first:end]))
            positions.append(places)
            slots.append(places + index * self._most_blocks * self._size)
            starts.append(starts[-1] + end - first)
            contexts.append(end)
            if not is_prefix:
                rows.append(torch.arange(starts[-1] - prompt.num_compared, starts[-1]))
        tables = torch.arange(len(self._prompts) * self._most_blocks, dtype=torch.int32)
        return ForwardBatch(
            tokens=torch.cat(tokens),
            positions=torch.cat(positions),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables.view(len(self._prompts), -1),
            slots=torch.cat(slots),
            logit_rows=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
        )


def runs(layers: Iterable[int]) -> list[range]:
    """Runs of adjacent layers."""
    found: list[range] = []
    for layer in sorted(layers):
        if found and found[-1].stop == layer:
            found[-1] = range(found[-1].start, layer + 1)
        else:
            found.append(range(layer, layer + 1))
    return found


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL divergence (nats) of log-probabilities ``[R, V]``."""
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def agreement(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Share of rows with the same most likely token."""
    return float((wanted.argmax(-1) == got.argmax(-1)).float().mean())
