"""What every kernel computes, in plain torch: the definition that faster versions are tested against.

Letters for shapes, here and in every kernel file:

    B  sequences in the batch      Hq   query heads          N  blocks of the paged cache
    T  tokens in the batch         Hkv  key and value heads  M  longest block table, in blocks
    D  head size                   G    Hq / Hkv             P  positions of the RoPE tables

``cache_layer`` is one layer of the paged cache, ``[N, 2, Hkv, block_tokens, D]``, usually a strided view. ``slots[t]``
is ``block_id * block_tokens + offset``. An int8 cache has rows of D codes followed by the 4 bytes of their float32
scale, ``[N, 2, Hkv, block_tokens, D + 4]``: a row is quantised once, when it is written, so sharing or moving a block
keeps its bits. In a cache of keys only, ``[N, 1, Hkv, block_tokens, D]``, the keys are also the values: multi-head
latent attention keeps one vector per token. Tokens of sequence b are ``query_starts[b] ≤ t < query_starts[b + 1]``: the
last of its ``context_lens[b]`` tokens. Sums are float32 for all input types. Nothing here knows about models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.recurrent import gated_delta as gated_delta
from mooncake.kernels.recurrent import short_convolution as short_convolution
from mooncake.kernels.recurrent import state_space as state_space
from mooncake.kernels.windows import first_seen
from mooncake.precision import Coding

device = torch.device("cpu")
SCALE_BYTES = 4  # a float32 after the codes of each int8 cache row
MAX_CODE = 127


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix ``[out, in]`` stored as int8 codes with a scale per output, which products use directly."""

    values: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # float32 [out]
    coding: Coding  # "int8", or "w8a8": activations are quantised too
    dtype: torch.dtype  # the model's

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def of_rows(self, order: torch.Tensor) -> Codes:
        """The same matrix with its outputs in another order."""
        return replace(self, values=self.values[order], scales=self.scales[order])

    def scaled(self, rows: torch.Tensor) -> Codes:
        """Each output multiplied by its factor in ``rows`` ``[out]``."""
        return replace(self, scales=self.scales * rows)

    def part(self, rows: slice, columns: slice) -> Codes:
        """These outputs and inputs, with the scales of all inputs."""
        return replace(self, values=self.values[rows, columns], scales=self.scales[rows])

    def to(self, device: torch.device) -> Codes:
        return Codes(self.values.to(device), self.scales.to(device), self.coding, self.dtype)

    def joins(self, other: Codes) -> bool:
        """Whether rows of both can be stacked into one matrix."""
        return self.coding == other.coding

    @staticmethod
    def stacked(parts: Sequence[Codes]) -> Codes:
        """One matrix of the rows of all ``parts``; every pair must join."""
        values, scales = torch.cat([each.values for each in parts]), torch.cat([each.scales for each in parts])
        return Codes(values, scales, parts[0].coding, parts[0].dtype)


Matrix = torch.Tensor | Codes | GroupedCodes
Matrices = torch.Tensor | Sequence[Matrix]


class Linear:
    """``x @ weight.T + bias`` for ``weight`` ``[out, in]``; ``rows`` reads the same matrix as an embedding table.

    Weights narrower than the activations are widened.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(hidden.dtype)
        return torch.nn.functional.linear(hidden, weight, None if self.bias is None else self.bias.to(hidden.dtype))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of ``weight``, ``[T, in]``, for int64 ``indices`` ``[T]``."""
        return torch.nn.functional.embedding(indices, self.weight)


class CodedLinear(Linear):
    """int8 weights with a scale per output; activations are not quantised."""

    def __init__(self, weight: torch.Tensor | Codes, bias: torch.Tensor | None = None) -> None:
        self.codes, self.scales, _ = coded(weight, "int8")
        super().__init__(self.codes * self.scales[:, None], None if bias is None else bias.float())


class W8A8Linear(Linear):
    """Activations are quantised too, per token; sums of products of codes are exact.

    Both sides first go through the same Hadamard transform, which leaves the product unchanged and spreads the few
    large channels that would use up a row's codes (QuaRot, Ashkboos et al. 2024). ``Codes`` were made without it.
    """

    def __init__(self, weight: torch.Tensor | Codes, bias: torch.Tensor | None = None) -> None:
        self.codes, self.scales, self._block = coded(weight, "w8a8")
        super().__init__(self._mixed(self.codes) * self.scales[:, None], None if bias is None else bias.float())

    def _mixed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._block == 1 else hadamard(rows)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise_rows(self._mixed(hidden))
        exact = (codes.double() @ self.codes.double().T).float()
        output = exact * (self.scales * scales[:, None])
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)


class GroupedLinear(Linear):
    """``GroupedCodes`` that meet codes, up to the rounding of sums."""

    def __init__(self, weight: GroupedCodes, bias: torch.Tensor | None) -> None:
        super().__init__(weight.weights(), None if bias is None else bias.float())
        self._group = weight.group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise_rows(hidden.reshape(*hidden.shape[:-1], -1, self._group))
        seen = (codes * scales[..., None]).flatten(-2)
        return torch.nn.functional.linear(seen, self.weight, self.bias).to(hidden.dtype)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes and float32 scales ``[...]`` of rows ``[..., n]``: scale = max|x| / 127, code = x / scale, rounded."""
    wide = rows.float()
    scales = wide.abs().amax(-1) / MAX_CODE
    codes = (wide / torch.where(scales > 0, scales, 1.0)[..., None]).round_()
    return codes.to(torch.int8), scales


def coded(weight: torch.Tensor | Codes, coding: Coding) -> tuple[torch.Tensor, torch.Tensor, int]:
    """int8 codes ``[out, in]``, float32 scales ``[out]``, and how many inputs were mixed with each other first."""
    if isinstance(weight, Codes):
        return weight.values, weight.scales, 1
    block = hadamard_size(weight.shape[1]) if coding == "w8a8" else 1
    return *quantise_rows(weight if block == 1 else hadamard(weight) / block), block


def hadamard_size(length: int) -> int:
    """How many elements of rows of this length are mixed with each other: 64, 32, 16, or 1 if none of these divides
    it."""
    size = math.gcd(length, 64)
    return size if size >= 16 else 1


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Float32: multiplies each block of ``hadamard_size(n)`` elements of rows ``[..., n]`` by Sylvester's matrix of ±1.

    Applied twice, it multiplies by that size.
    """
    size = hadamard_size(rows.shape[-1])
    mixed = rows.float().reshape(-1, size).T.clone(memory_format=torch.contiguous_format)  # long runs to add
    step = 1
    while step < size:
        first, second = mixed.view(-1, 2, step, mixed.shape[1]).unbind(1)
        difference = first - second
        first += second
        second.copy_(difference)
        step *= 2
    return mixed.T.contiguous().view(rows.shape)


def linear(weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = "") -> Linear:
    """A linear layer over these weights, in the fastest form; ``weight`` need not be kept. ``Codes`` have their own
    coding; ``GroupedCodes`` are dequantised."""
    if isinstance(weight, GroupedCodes) and weight.meets_codes:
        return GroupedLinear(weight, bias)
    if isinstance(weight, GroupedCodes):
        weight = weight.weights()
    coding = weight.coding if isinstance(weight, Codes) else coding
    if coding:
        return (W8A8Linear if coding == "w8a8" else CodedLinear)(weight, bias)
    assert isinstance(weight, torch.Tensor)
    return Linear(weight, bias)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of gpt-oss's SwiGLU (OpenAI 2025): ``g · sigmoid(alpha · g) · (u + 1)``, with g at most ``limit`` and u
    within ±``limit``."""

    alpha: float
    limit: float


Gate = Literal["silu", "gelu_tanh", "relu2"]
"""What gates of experts go through. With "relu2" there are none: it is what ups go through (Nemotron-H)."""
GATES = get_args(Gate)


class Experts:
    """A layer's gated MLPs, ``gate_up`` ``[E, 2 * I, hidden]`` with gates above ups and ``down`` ``[E, hidden, I]``, as
    tensors or as lists of matrices. Experts are numbered from ``first`` on; other ranks hold the others. ``gate`` is
    silu where there are ``bounds``."""

    def __init__(
        self,
        gate_up: Matrices,
        down: Matrices,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        bounds: Bounds | None = None,
        first: int = 0,
        gate: Gate = "silu",
        coding: Coding = "",
    ) -> None:
        self._gate_up, self._down = (
            [linear(*given, coding) for given in zip(weights, biases_of(biases, weights), strict=True)]
            for weights, biases in ((gate_up, gate_up_bias), (down, down_bias))
        )
        self._bounds, self._first, self._gate = bounds, first, gate

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """For each token of ``hidden`` ``[T, hidden]``, the sum of the outputs of its ``chosen`` experts (int64
        ``[T, k]``, none twice), weighted by ``shares`` float32 ``[T, k]``. Added in float32 in the order of the
        experts' numbers, so that batches do not change it."""
        mixed = torch.zeros_like(hidden, dtype=torch.float32)
        for number, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True), self._first):
            tokens, choices = torch.where(chosen == number)
            if len(tokens):
                output = down(self._gated(gate_up(hidden[tokens])))
                mixed.index_add_(0, tokens, output.float() * shares[tokens, choices, None])
        return mixed.to(hidden.dtype)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._gate == "relu2":
            return torch.nn.functional.relu(gate_up).square()
        if self._gate == "gelu_tanh":
            gate, up = gate_up.float().chunk(2, dim=-1)
            return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
        if self._bounds is None:
            return silu_mul(gate_up)
        alpha, limit = self._bounds.alpha, self._bounds.limit
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def biases_of(biases: torch.Tensor | None, weights: Matrices) -> Iterable[torch.Tensor | None]:
    """One for each of the experts with these ``weights``."""
    return [None] * len(weights) if biases is None else biases


experts = Experts


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (Zhang and Sennrich 2019)."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def add_rms_norm(residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``residual += update``, in place; returns rms_norm(residual)."""
    residual.add_(update)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[T, 2 * I]``, gate first; returns ``[T, I]`` (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, H, D]``, element i with element i + D/2 (RoFormer, in the rotate-half form).

    ``cos`` and ``sin`` are float32 ``[P, D/2]``.
    """
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_t - second * sin_t, second * cos_t + first * sin_t], dim=-1)
    return turned.to(heads.dtype)


def head_dim_of(cache_layer: torch.Tensor) -> int:
    return cache_layer.shape[4] - (SCALE_BYTES if cache_layer.dtype is torch.int8 else 0)


def write_kv(key: torch.Tensor, value: torch.Tensor | None, cache_layer: torch.Tensor, slots: torch.Tensor) -> None:
    """Write ``key`` and ``value``, ``[T, Hkv, D]``, to ``slots``; a cache of keys only gets no values."""
    block_tokens = cache_layer.shape[3]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    cache_layer[blocks, 0, :, offsets] = as_page_rows(key, cache_layer.dtype)
    if value is not None:
        cache_layer[blocks, 1, :, offsets] = as_page_rows(value, cache_layer.dtype)


def as_page_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of keys or values ``[..., D]`` in the form of a cache of this type."""
    if dtype is not torch.int8:
        return rows.to(dtype)
    codes, scales = quantise_rows(rows)
    return torch.cat([codes, scales.unsqueeze(-1).view(torch.int8)], dim=-1)


def from_page_rows(rows: torch.Tensor) -> torch.Tensor:
    """The float32 values ``[..., D]`` of a cache's rows."""
    if rows.dtype is not torch.int8:
        return rows.float()
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes.float() * scales


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache_layer: torch.Tensor,
    slots: torch.Tensor,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Everything between the fused projection and attention: norms of query and key heads if given, RoPE, cache write.

    ``qkv`` is ``[T, (Hq + 2 * Hkv) * D]``: all query heads, then key heads, then value heads (omitted with a cache of
    keys only); it may be overwritten. With a cache of no heads (Hkv = 0) queries are rotated and nothing is written.
    Returns the queries, ``[T, Hq, D]``, possibly a view of ``qkv``.
    """
    num_kinds, num_kv_heads, head_dim = *cache_layer.shape[1:3], head_dim_of(cache_layer)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - num_kinds * num_kv_heads
    query, key, value = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps)
    write_kv(rope(key, cos, sin, positions), value if num_kinds == 2 else None, cache_layer, slots)
    return rope(query, cos, sin, positions)


def copy_turned(
    cache_layer: torch.Tensor,
    sources: torch.Tensor,
    slots: torch.Tensor,
    shifts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Copy keys and values from slot to slot, keys rotated by ``shifts`` positions: int64 [T] each. ``cos`` and ``sin``
    [P, D / 2] are of rotations alone."""
    block_tokens = cache_layer.shape[3]
    stored = cache_layer[sources // block_tokens, :, :, sources % block_tokens]  # [T, K|V, Hkv, row]
    write_kv(rope(from_page_rows(stored[:, 0]), cos, sin, shifts), None, cache_layer, slots)
    cache_layer[slots // block_tokens, 1, :, slots % block_tokens] = stored[:, 1]


def paged_attention(
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ``query`` ``[T, Hq, D]`` over each sequence's own context; returns ``[T, Hq, D]``.

    Query head h reads KV head ``h // G``. With ``window`` w > 0 a token sees itself and the w - 1 before it; with w < 0
    only those of its chunk, which begins at a multiple of -w (Llama 4). Blocks before all that a sequence's queries see
    are not read, whatever its table contains there. With ``softcap``
    c > 0 a score s becomes ``c * tanh(s / c)`` (Gemma 2). With ``sinks`` ``[Hq]`` each query has one more score, its
    head's, for a value of zeros: it takes a share of the attention and adds nothing (gpt-oss, after StreamingLLM, Xiao
    et al. 2023). With ``alibi_slopes`` ``[Hq]`` a score falls by its head's slope for each token between key and query
    (ALiBi, Press et al. 2021).
    """
    output, block_tokens = torch.empty_like(query), cache_layer.shape[3]
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for b, context in enumerate(contexts):
        rows = slice(starts[b], starts[b + 1])
        first_query = context - (rows.stop - rows.start)
        hidden = max(first_seen(first_query, window), 0) // block_tokens if window else 0  # blocks
        first_key = hidden * block_tokens
        scores, value = _scores(query[rows], cache_layer, block_tables[b, hidden:], context - first_key, scale, softcap)
        query_at = torch.arange(first_query, context, device=scores.device)[:, None]
        key_at = torch.arange(first_key, context, device=scores.device)
        if alibi_slopes is not None:
            scores += alibi_slopes.float().view(*scores.shape[:2], 1, 1) * (key_at - query_at)
        seen = key_at <= query_at
        if window:
            seen &= key_at >= first_seen(query_at, window)
        scores.masked_fill_(~seen, float("-inf"))
        mixed = torch.einsum("kgts,ksd->tkgd", _shares(scores, sinks), value)
        output[rows] = mixed.flatten(1, 2).to(query.dtype)
    return output


def partial_attention(
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over part of each sequence's context, at any ``positions`` of it; ``merge_attention`` combines parts.

    Query t sees the first ``positions[t] + 1`` (int32 [T], rising in each sequence) of its sequence's
    ``context_lens[b]`` tokens here, at most all of them; there may be none. Returns the output ``[T, Hq, D]`` and its
    log-sum-exp ``[T, Hq]``, float32; zeros and -inf for a query that sees nothing.
    """
    output, log_sums = torch.zeros_like(query), query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    starts = query_starts.tolist()
    for b, context in enumerate(context_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        if not context or rows.start == rows.stop:
            continue
        scores, value = _scores(query[rows], cache_layer, block_tables[b], context, scale, softcap)
        scores.masked_fill_(torch.arange(context, device=scores.device) > positions[rows, None], float("-inf"))
        sums = scores.logsumexp(-1)  # [Hkv, G, t]
        mixed = torch.einsum("kgts,ksd->tkgd", (scores - sums[..., None]).exp(), value)
        output[rows] = mixed.flatten(1, 2).to(query.dtype)
        log_sums[rows] = sums.flatten(0, 1).T
    return output, log_sums


def positions_from(firsts: torch.Tensor, query_starts: torch.Tensor) -> torch.Tensor:
    """Int32 [T], for ``partial_attention``: the positions of queries that are adjacent from ``firsts`` [B] on."""
    befores = torch.repeat_interleave(firsts - query_starts[:-1], query_starts.diff())
    return (befores + torch.arange(len(befores))).int()


def merge_attention(
    output: torch.Tensor, log_sums: torch.Tensor, other: torch.Tensor, other_log_sums: torch.Tensor
) -> None:
    """Combine, in place, attention over one part of a context with that of the same queries over another part (Milakov
    and Gimelshein 2018): outputs ``[T, Hq, D]`` are weighted by their shares of the sum of exponentials."""
    weight = torch.sigmoid(other_log_sums - log_sums)
    weight.nan_to_num_(0.0)  # if both saw nothing
    output.lerp_(other, weight.unsqueeze(-1))
    torch.logaddexp(log_sums, other_log_sums, out=log_sums)


def _scores(
    query: torch.Tensor, cache_layer: torch.Tensor, table: torch.Tensor, context: int, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one sequence's queries ``[t, Hq, D]`` with its first ``context`` tokens, ``[Hkv, G, t, context]``,
    unmasked; and those tokens' values, ``[Hkv, context, D]``."""
    num_kv_heads = cache_layer.shape[2]
    num_blocks = -(-context // cache_layer.shape[3])
    pages = from_page_rows(cache_layer[table[:num_blocks].long()])  # [n, K|V, Hkv, block_tokens, D]
    kinds = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    key, value = kinds[0], kinds[-1]  # [Hkv, context, D] each
    queries = query.float().reshape(query.shape[0], num_kv_heads, -1, query.shape[2])  # [t, Hkv, G, D]
    scores = torch.einsum("tkgd,ksd->kgts", queries, key) * scale
    return (softcap * torch.tanh(scores / softcap) if softcap else scores), value


def _shares(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of ``[Hkv, G, t, context]``, of which a sink takes a share."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
