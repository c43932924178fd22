"""Wire messages to the project's own types and back. Nothing else reads protobuf fields of these values."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mooncake.errors import BrokenPeer, InvalidRequest, shown
from mooncake.pooling import Pooling, Vector
from mooncake.rpc import common_pb2 as pb
from mooncake.sampling import (
    DEFAULT_MAX_TOKENS,
    BeamSearch,
    Guide,
    GuideKind,
    RepetitionDetection,
    SamplingParams,
    ThinkingBudget,
)
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults
from mooncake.types import (
    BlockEvent,
    BlockKey,
    PrefillReport,
    SampledToken,
    SegmentAddress,
    Tier,
    Timings,
    TokenIds,
    TokenLogprob,
)

T = TypeVar("T")

_NEVER_MS = 1e12  # longer than any process has run
SCORE_BYTES, TOP_BYTES = 32, 17  # of a scored token on the wire, and of each alternative beside it, at most


def tokens_to_wire(tokens: TokenIds) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<u4").tobytes()


def tokens_from_wire(data: bytes) -> TokenIds:
    """Raises InvalidRequest when the buffer is not a whole number of uint32."""
    if len(data) % 4:
        raise InvalidRequest("token buffer length is not a multiple of 4", "tokens")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def sampling_to_wire(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[pb.TokenRun(ids=word) for word in sampling.bad_words],
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        n=sampling.n,
        best_of=sampling.best_of,
        beam_search=_beams_to_wire(sampling.beam_search),
        guide=_guide_to_wire(sampling.guide),
        repetition_detection=_repetition_to_wire(sampling.repetition_detection),
        thinking_budget=_budget_to_wire(sampling.thinking_budget),
    )


def _beams_to_wire(beams: BeamSearch | None) -> pb.BeamSearch | None:
    if beams is None:
        return None
    return pb.BeamSearch(length_penalty=beams.length_penalty, early_stopping=beams.early_stopping)


def _repetition_to_wire(wanted: RepetitionDetection | None) -> pb.RepetitionDetection | None:
    if wanted is None:
        return None
    return pb.RepetitionDetection(
        max_pattern_size=wanted.max_pattern_size,
        min_count=wanted.min_count,
        min_pattern_size=wanted.min_pattern_size,
    )


def _budget_to_wire(budget: ThinkingBudget | None) -> pb.ThinkingBudget | None:
    if budget is None:
        return None
    return pb.ThinkingBudget(num_tokens=budget.num_tokens, end=budget.end, begin=budget.begin)


def sampling_from_wire(message: pb.SamplingParams, model: SamplingDefaults = NEUTRAL) -> SamplingParams:
    """Unset fields take their defaults, those of ``model`` first; an unset seed is drawn. Raises InvalidRequest for
    values out of range."""
    defaults = NEUTRAL if message.HasField("beam_search") else model
    return SamplingParams(
        max_tokens=_given(message, "max_tokens", DEFAULT_MAX_TOKENS),
        min_tokens=message.min_tokens,
        temperature=_given(message, "temperature", defaults.temperature),
        top_k=_given(message, "top_k", defaults.top_k),
        top_p=_given(message, "top_p", defaults.top_p),
        min_p=_given(message, "min_p", defaults.min_p),
        repetition_penalty=_given(message, "repetition_penalty", defaults.repetition_penalty),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=_given(message, "logprobs", None),
        prompt_logprobs=_given(message, "prompt_logprobs", None),
        n=message.n or 1,
        best_of=message.best_of,
        beam_search=_beams_from_wire(message.beam_search) if message.HasField("beam_search") else None,
        guide=_guide_from_wire(message.guide) if message.HasField("guide") else None,
        repetition_detection=(
            _repetition_from_wire(message.repetition_detection) if message.HasField("repetition_detection") else None
        ),
        thinking_budget=_budget_from_wire(message.thinking_budget) if message.HasField("thinking_budget") else None,
    )


def _given(message: pb.SamplingParams, field: str, default: T) -> T:
    """The field's value if it is set."""
    value: T = getattr(message, field) if message.HasField(field) else default  # type: ignore[arg-type]
    return value


def _beams_from_wire(message: pb.BeamSearch) -> BeamSearch:
    return BeamSearch(message.length_penalty, message.early_stopping)


def _repetition_from_wire(message: pb.RepetitionDetection) -> RepetitionDetection:
    return RepetitionDetection(message.max_pattern_size, message.min_count, message.min_pattern_size or 1)


def _budget_from_wire(message: pb.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(message.num_tokens, message.end, message.begin if message.HasField("begin") else None)


def _guide_to_wire(guide: Guide | None) -> pb.Guide | None:
    return None if guide is None else pb.Guide(kind=guide.kind, text=guide.text, lead=guide.lead)


def _guide_from_wire(message: pb.Guide) -> Guide:
    try:
        return Guide(GuideKind(message.kind), message.text, message.lead)
    except ValueError:
        raise InvalidRequest(f"a guide cannot be a {shown(message.kind)}", "guide") from None


def sampled_to_wire(token: SampledToken) -> pb.SampledToken:
    message = pb.SampledToken(index=token.index, token_id=token.token_id)
    if token.logprob is not None:
        message.logprob = token.logprob.logprob
        message.rank = token.logprob.rank
        message.top.extend(pb.TopLogprob(token_id=i, logprob=value) for i, value in token.logprob.top)
    return message


def sampled_from_wire(message: pb.SampledToken) -> SampledToken:
    logprob = None
    if message.HasField("logprob"):
        logprob = TokenLogprob(message.logprob, tuple((top.token_id, top.logprob) for top in message.top), message.rank)
    return SampledToken(message.index, message.token_id, logprob)


def prompt_logprobs_to_wire(prompt: TokenIds, scores: Sequence[TokenLogprob]) -> pb.PromptLogprobs:
    """Of all tokens of ``prompt`` but the first."""
    tokens = enumerate(zip(prompt[1:].tolist(), scores, strict=False), 1)
    return pb.PromptLogprobs(tokens=[sampled_to_wire(SampledToken(i, token, score)) for i, (token, score) in tokens])


def prompt_logprobs_from_wire(message: pb.PromptLogprobs) -> tuple[SampledToken, ...]:
    return tuple(sampled_from_wire(token) for token in message.tokens)


class UnreadScores(Collection[SampledToken]):
    """A prompt's log-probabilities as they came. They are read whenever somebody iterates: a million take a second, so
    whoever needs them does so in a thread, and whoever passes them on not at all."""

    def __init__(self, message: pb.PromptLogprobs) -> None:
        self.message = message

    def __len__(self) -> int:
        return len(self.message.tokens)

    def __iter__(self) -> Iterator[SampledToken]:
        return map(sampled_from_wire, self.message.tokens)

    def __contains__(self, token: object) -> bool:
        return any(token == one for one in self)


def check_scores(num_tokens: int, num_top: int, most_bytes: int) -> None:
    """Raises InvalidRequest when the scores of so many tokens, with ``num_top`` alternatives each, are more than one
    message holds."""
    most = most_bytes // (SCORE_BYTES + num_top * TOP_BYTES)
    if num_tokens > most:
        sentence = f"prompt_logprobs of {num_top} is for prompts of at most {most} tokens, this one has {num_tokens}"
        raise InvalidRequest(sentence, "prompt_logprobs")


def pooling_from_wire(name: str) -> Pooling | None:
    """Raises InvalidRequest."""
    try:
        return Pooling(name) if name else None
    except ValueError:
        raise InvalidRequest(f"hidden states cannot be pooled by {shown(name)}", "pooling") from None


def vector_to_wire(vector: Vector) -> bytes:
    return vector.astype("<f4").tobytes()


def vector_from_wire(data: bytes) -> Vector:
    """Raises BrokenPeer for what is no vector of finite numbers."""
    if not data or len(data) % 4:
        raise BrokenPeer(f"{len(data)} bytes are no vector")
    vector = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(vector).all():
        raise BrokenPeer("a vector has numbers that are not finite")
    return vector


def segment_to_wire(address: SegmentAddress) -> pb.SegmentAddress:
    return pb.SegmentAddress(
        node_id=address.node_id,
        incarnation=address.incarnation,
        host_id=address.host_id,
        unix_path=address.unix_path,
        tcp_address=address.tcp_address,
        block_bytes=address.block_bytes,
        num_blocks=address.num_blocks,
        rdma=address.rdma,
    )


def segment_from_wire(message: pb.SegmentAddress) -> SegmentAddress:
    return SegmentAddress(
        node_id=message.node_id,
        incarnation=message.incarnation,
        host_id=message.host_id,
        unix_path=message.unix_path,
        tcp_address=message.tcp_address,
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        rdma=message.rdma,
    )


def event_to_wire(event: BlockEvent) -> pb.BlockEvent:
    return pb.BlockEvent(stored=event.stored, key=event.key, parent=event.parent, tier=event.tier)


def event_from_wire(message: pb.BlockEvent) -> BlockEvent:
    tier = Tier.SSD if message.tier else Tier.DRAM
    return BlockEvent(message.stored, BlockKey(message.key), message.parent, tier)


def report_to_wire(report: PrefillReport) -> pb.PrefillReport:
    timings = report.timings
    return pb.PrefillReport(
        prompt_tokens=report.prompt_tokens,
        local_cached_tokens=report.local_cached_tokens,
        pool_cached_tokens=report.pool_cached_tokens,
        sent_bytes=report.sent_bytes,
        pool_bytes=report.pool_bytes,
        blended_tokens=report.blended_tokens,
        inherited_tokens=report.inherited_tokens,
        transport=report.transport,
        timings=pb.Timings(
            queue_ms=timings.queue_ms,
            load_ms=timings.load_ms,
            prefill_ms=timings.prefill_ms,
            handoff_ms=timings.handoff_ms,
            decode_ms=timings.decode_ms,
        ),
    )


def ms_from_wire(ms: float) -> float:
    """A duration that a peer tells; 0 for one that is none: a single NaN would stay in every sum that it came into."""
    return ms if 0 <= ms < _NEVER_MS else 0.0


def report_from_wire(message: pb.PrefillReport) -> PrefillReport:
    timings = message.timings
    return PrefillReport(
        prompt_tokens=message.prompt_tokens,
        local_cached_tokens=message.local_cached_tokens,
        pool_cached_tokens=message.pool_cached_tokens,
        sent_bytes=message.sent_bytes,
        pool_bytes=message.pool_bytes,
        blended_tokens=message.blended_tokens,
        inherited_tokens=message.inherited_tokens,
        transport=message.transport,
        timings=Timings(
            *map(
                ms_from_wire,
                (timings.queue_ms, timings.load_ms, timings.prefill_ms, timings.handoff_ms, timings.decode_ms),
            )
        ),
    )
