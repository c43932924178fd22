"""Recorded request traces in Mooncake's JSONL format: reading, scaling, synthetic tokens, and exact cache hits.

A trace has arrival times, lengths and one id per prompt block; an id names a block together with everything before it,
so equal ids are equal prefixes. Pure, except for reading and writing files: no cluster, no clock, and of a model only
the vocabulary size.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import lzma
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, Literal, cast, overload

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidRequest
from mooncake.types import TokenIds

TRACE_BLOCK_TOKENS = 512  # tokens per id in the published traces
MAX_LINE_BYTES = 1 << 22
AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 1 << 26, 1 << 20  # larger numbers are mistakes, and would take forever to play
_DIGITS = 4  # leading tokens of a block that encode its id, so that different ids give different blocks


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. ``len(hash_ids) == ceil(input_length / tokens per block)``: the last may be partial."""

    timestamp_ms: float  # from the start of the trace
    input_length: int  # prompt tokens
    output_length: int
    hash_ids: tuple[int, ...]


class _Line(msgspec.Struct, frozen=True):
    """One line of the file. Unknown fields are ignored: other tools add their own."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_ANSWER_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests (or all) of a JSONL file, plain, .gz or .xz, in the order of the file.

    Raises InvalidRequest with the file and line for anything that is not such a trace.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TraceRequest] = []
    for number, text in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        if not text.strip():
            continue
        if number == 1 and text.startswith(AZURE_HEADER):
            raise InvalidRequest(
                f"{path} is a CSV of lengths without block hashes; what is needed is a trace in Mooncake's JSONL form, "
                "whose hash_ids say which prompts begin alike"
            )
        try:
            request = _request(decoder.decode(text))
            if requests and request.timestamp_ms < requests[-1].timestamp_ms:
                raise ValueError(f"timestamp {request.timestamp_ms:g} is before that of the request above")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            form = f"; a trace is lines of JSON with {', '.join(_Line.__struct_fields__)}" if not requests else ""
            raise InvalidRequest(f"{path}:{number}: {error}{form}") from None
        requests.append(request)
    if not requests:
        raise InvalidRequest(f"{path}: the trace holds no request")
    return requests


def load_azure(path: Path, limit: int | None) -> list[TraceRequest]:
    """The first ``limit`` requests (or all) of an Azure LLM inference trace (CSV, plain, .gz or .xz), by time.

    It has no prefix information, so every block gets a different id. Raises InvalidRequest with the file and line.
    """
    rows: list[tuple[float, int, int]] = []
    for line, text in _lines(path):
        if line == 1 or not text.strip():
            if line == 1 and not text.startswith(AZURE_HEADER):
                raise InvalidRequest(f"{path}:1: expected the columns {AZURE_HEADER.decode()}")
            continue
        try:
            [(moment, context, generated)] = csv.reader([text.decode()])
            second, _, fraction = moment.partition(".")
            at_s = datetime.fromisoformat(f"{second}+00:00").timestamp() + float(f"0.{fraction or 0}")
            prompt, answer = int(context), int(generated)
            if not (0 <= prompt <= MAX_PROMPT_TOKENS and 0 <= answer <= MAX_ANSWER_TOKENS):
                raise ValueError(f"{prompt} and {answer} are no lengths of a prompt and an answer")
            rows.append((at_s * 1e3, prompt, answer))
        except ValueError as error:
            raise InvalidRequest(f"{path}:{line}: {error}") from None
    rows.sort()
    requests, next_id = [], 0
    for at_ms, prompt, answer in rows[:limit]:
        num_blocks = _ceil_div(max(prompt, 1), TRACE_BLOCK_TOKENS)
        ids = tuple(range(next_id, next_id + num_blocks))
        next_id += num_blocks
        requests.append(TraceRequest(at_ms - rows[0][0], max(prompt, 1), answer, ids))
    if not requests:
        raise InvalidRequest(f"{path}: the trace holds no request")
    return requests


def save_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write Mooncake's JSONL format; ``.xz`` and ``.gz`` compress."""
    encoder = msgspec.json.Encoder()
    try:
        with _open(path, "wb") as file:
            for request in requests:
                line = _Line(
                    round(request.timestamp_ms, 3), request.input_length, request.output_length, request.hash_ids
                )
                file.write(encoder.encode(line) + b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot write the trace {path}: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with _open(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise InvalidRequest(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{path}: the compressed file is damaged: {error}") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error.strerror or error}") from None


def _open(path: Path, mode: Literal["rb", "wb"] = "rb") -> IO[bytes]:
    if path.suffix == ".xz":
        return lzma.open(path, mode)
    return cast(IO[bytes], gzip.open(path, mode)) if path.suffix == ".gz" else path.open(mode)


def _request(line: _Line) -> TraceRequest:
    num_blocks = _ceil_div(line.input_length, TRACE_BLOCK_TOKENS)
    if len(line.hash_ids) != num_blocks:
        raise ValueError(
            f"{line.input_length} tokens are {num_blocks} blocks of {TRACE_BLOCK_TOKENS}, "
            f"but there are {len(line.hash_ids)} hash_ids"
        )
    return TraceRequest(line.timestamp, line.input_length, line.output_length, line.hash_ids)


def scale(request: TraceRequest, tokens_per_block: int, max_output: int | None = None) -> TraceRequest:
    """The same request with ``tokens_per_block`` tokens per id, so that it fits a smaller context.

    Blocks, and so the shared prefixes, stay exactly the same; a partial block keeps its proportion.
    """
    output_length = max(1, _ceil_div(request.output_length * tokens_per_block, TRACE_BLOCK_TOKENS))
    return replace(
        request,
        input_length=_ceil_div(request.input_length * tokens_per_block, TRACE_BLOCK_TOKENS),
        output_length=output_length if max_output is None else min(output_length, max_output),
    )


class ResampledTrace(Sequence[TraceRequest]):
    """``num_requests`` requests from copies of a trace, in parallel over the same time span.

    Each copy is another set of users: it has its own ids, so nothing is shared between copies, and it begins at a
    random time (seeded) and wraps around, so that peaks do not coincide. The last copy is a random part of the trace.
    The load grows with the number of copies. Requests are created on access.
    """

    def __init__(self, trace: Sequence[TraceRequest], num_requests: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = len(trace)
        copies = _ceil_div(num_requests, size)
        times = np.array([request.timestamp_ms for request in trace])
        span_ms = float(times[-1] - times[0]) + 1.0
        shifts = rng.uniform(0.0, span_ms, copies)
        shifted = ((times - times[0])[None, :] + shifts[:, None]) % span_ms
        kept = np.arange(copies * size)
        if copies * size > num_requests:
            last = rng.permutation(size)[: num_requests - (copies - 1) * size] + (copies - 1) * size
            kept = np.concatenate([kept[: (copies - 1) * size], np.sort(last)])
        moments = shifted.ravel()[kept]
        order = np.argsort(moments, kind="stable")
        self._trace = trace
        self._size = size
        self._number = kept[order]
        self.timestamps_ms = moments[order]
        self._stride = 1 + max(max(request.hash_ids) for request in trace)

    def __len__(self) -> int:
        return len(self._number)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | list[TraceRequest]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        request, offset = self.original(index)
        ids = tuple([block + offset for block in request.hash_ids])
        return TraceRequest(float(self.timestamps_ms[index]), request.input_length, request.output_length, ids)

    def original(self, index: int) -> tuple[TraceRequest, int]:
        """The request that this one is a copy of, and the offset of its ids."""
        copy, at = divmod(self._number.item(index), self._size)
        return self._trace[at], copy * self._stride

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Lengths of all prompts and answers (tokens), without creating the requests."""
        inputs = np.array([request.input_length for request in self._trace], dtype=np.int64)
        outputs = np.array([request.output_length for request in self._trace], dtype=np.int64)
        which = self._number % self._size
        return inputs[which], outputs[which]


def trace_tokens(request: TraceRequest, tokens_per_block: int, vocab_size: int) -> TokenIds:
    """Token ids for a (scaled) request: each block's tokens are a function of its id alone, so equal ids are equal
    prefixes in every process. A partial last block takes the first of its id's tokens.

    Both ends of the vocabulary, where special tokens are, are left out. Different ids give different blocks if a block
    has at least ``_DIGITS`` tokens.
    """
    if len(request.hash_ids) != _ceil_div(request.input_length, tokens_per_block):
        raise InvalidRequest(f"the request is not scaled to {tokens_per_block} tokens a block", "tokens_per_block")
    if vocab_size < 64:
        raise InvalidRequest(f"a vocabulary of {vocab_size} is too small to stand for a trace", "vocab_size")
    margin = vocab_size // 32
    base = np.uint64(vocab_size - 2 * margin)
    ids = np.asarray(request.hash_ids, dtype=np.uint64)[:, None]
    places = np.arange(tokens_per_block, dtype=np.uint64)
    tokens: npt.NDArray[np.uint64] = _mix(ids * np.uint64(0x9E3779B97F4A7C15) + places) % base
    for digit in range(min(_DIGITS, tokens_per_block)):
        tokens[:, digit] = (ids[:, 0] // base ** np.uint64(digit)) % base
    return (tokens.ravel()[: request.input_length] + np.uint64(margin)).astype(np.uint32)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): scatters 64 bits, wrapping on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class HitCount:
    """Prefix-cache hits over a list of requests. The three rates differ by percents: always name the one used."""

    requests: int = 0
    blocks: int = 0  # prompt blocks, including partial last ones
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    sum_of_ratios: float = 0.0  # sum over requests of the share of blocks hit

    @property
    def block_rate(self) -> float:
        return self.hit_blocks / max(1, self.blocks)

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / max(1, self.tokens)

    @property
    def request_mean_rate(self) -> float:
        return self.sum_of_ratios / max(1, self.requests)

    def plus(self, blocks: int, hit_blocks: int, tokens: int, hit_tokens: int) -> HitCount:
        return HitCount(
            self.requests + 1,
            self.blocks + blocks,
            self.hit_blocks + hit_blocks,
            self.tokens + tokens,
            self.hit_tokens + hit_tokens,
            self.sum_of_ratios + hit_blocks / max(1, blocks),
        )


def expected_hits(
    requests: Iterable[TraceRequest],
    capacity_blocks: int | None = None,
    tokens_per_block: int = TRACE_BLOCK_TOKENS,
    whole_blocks_only: bool = False,
) -> HitCount:
    """Hits of one LRU cache of ``capacity_blocks`` (None: infinite) that serves the requests one after the other.

    A hit is the longest cached prefix. All prompt blocks are stored after the request, and touched from the first on.
    The default counts as the published analyses do. With ``whole_blocks_only``, as in our engine, a partial last block
    is never stored, and the last token of a prompt is always computed.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    count = HitCount()
    for request in requests:
        stored, usable = len(request.hash_ids), len(request.hash_ids)
        if whole_blocks_only:
            stored = request.input_length // tokens_per_block
            usable = (request.input_length - 1) // tokens_per_block
        hit = _leading_run(request.hash_ids[:usable], cache)
        count = count.plus(
            len(request.hash_ids), hit, request.input_length, min(hit * tokens_per_block, request.input_length)
        )
        for block in request.hash_ids[:stored]:
            cache[block] = None
            cache.move_to_end(block)
        while capacity_blocks is not None and len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return count


def _leading_run(blocks: tuple[int, ...], cache: OrderedDict[int, None]) -> int:
    return next((index for index, block in enumerate(blocks) if block not in cache), len(blocks))


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
