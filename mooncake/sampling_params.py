"""What a user asks of an answer, by vLLM's names: ``mooncake.SamplingParams``, and what goes into it.

A form that may also be filled in after it was made, and that names texts: stop strings, words, schemas. What travels
and computes is ``mooncake.sampling.SamplingParams``, which knows token ids alone; ``for_engine`` leads there. No
tokenizer, wire format or engine is known here.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral

import msgspec

from mooncake import sampling
from mooncake.errors import InvalidRequest, shown
from mooncake.llm_absent import OF_FORMS, OF_SAMPLING, form_says_counterparts
from mooncake.sampling import BeamSearch, Guide, GuideKind, RepetitionDetection, ThinkingBudget, check_type


class RequestOutputKind(Enum):
    """vLLM's: what of an answer each result of ``AsyncLLM`` has. ``LLM`` returns whole answers, as vLLM's does."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@form_says_counterparts(OF_FORMS)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer, by one of these. Raises InvalidRequest for none, or several."""

    json: Mapping[str, object] | str | None = None  # a schema, or its text
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark's, or GBNF
    json_object: bool | None = None  # any object
    disable_any_whitespace: bool = False  # no effect: answers have no more white space than the guide asks for

    def __post_init__(self) -> None:
        given = self.guides()
        if not given:
            known = "json, regex, choice, grammar, json_object"
            raise InvalidRequest(f"structured_outputs need one of {known}", "structured_outputs")
        check_one_guide({f"structured_outputs.{name}": guide for name, guide in given.items()})

    def guides(self) -> dict[str, Guide]:
        """By the names of the fields they come from."""
        return guides_of(self.json, self.json_object, self.regex, self.choice, self.grammar)


@form_says_counterparts(OF_SAMPLING)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to generate an answer. Greedy when ``temperature`` is 0.

    ``logprobs`` is None for none, or the number of most likely tokens wanted beside the chosen one: 0 to 20, and more,
    or -1 for the whole vocabulary, where ``LLM(…, max_logprobs=…)`` allows it; ``prompt_logprobs`` likewise for the
    tokens of the prompt. With ``n``, answer i draws from ``seed + i``; with
    ``best_of`` that many are generated and the ``n`` most likely per token are kept.
    """

    n: int = 1
    best_of: int | None = None  # None or 0: n
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    min_p: float = 0.0
    seed: int | None = None  # None or -1: a random one
    max_tokens: int | None = 16  # None: what the context leaves
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None  # the answer ends before the first of these
    stop_token_ids: Collection[int] | None = None
    include_stop_str_in_output: bool = False  # or behind it
    detokenize: bool = True  # whether the answer has a text
    skip_special_tokens: bool = True  # leave control tokens out of it
    spaces_between_special_tokens: bool = True  # no effect: there are none, as with vLLM's fast tokenizers
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Collection[int] | None = None  # only these may be drawn
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guide: Guide | None = None  # the same in this project's form
    repetition_detection: RepetitionDetection | None = None
    thinking_budget: ThinkingBudget | None = None
    beam_search: BeamSearch | None = None  # over n beams; nothing is sampled then

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field, for any value of a wrong type or out of range. Values that are set
        later are checked when they are used, and so is whether as many ``logprobs`` may be asked for."""
        self.for_engine(max_logprobs=sampling.MAX_ALLOWED_TOKEN_IDS)

    def clone(self) -> SamplingParams:
        """A copy that can be changed alone."""
        return copy.deepcopy(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Raises InvalidRequest."""
        return _texts("stop", self.stop)

    @property
    def forbidden(self) -> tuple[str, ...]:
        """The ``bad_words``. Raises InvalidRequest."""
        return _texts("bad_words", self.bad_words)

    def for_engine(
        self,
        longest: int = sampling.MAX_TOKENS,
        bad_words: tuple[tuple[int, ...], ...] = (),
        max_logprobs: int = sampling.MAX_TOP_LOGPROBS,
        vocab_size: int = sampling.MAX_ALLOWED_TOKEN_IDS,
    ) -> sampling.SamplingParams:
        """What of it concerns tokens, with a seed. ``longest`` stands for ``max_tokens`` None, ``bad_words`` are the
        tokens of ``forbidden``, ``vocab_size`` stands for ``logprobs`` -1. Raises InvalidRequest, naming the field."""
        for name in ("detokenize", "skip_special_tokens", "include_stop_str_in_output", "ignore_eos"):
            check_type(name, getattr(self, name), bool)
        check_type("output_kind", self.output_kind, RequestOutputKind, "a RequestOutputKind")
        if "" in self.stop_strings:
            raise InvalidRequest("a stop string is empty", "stop")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("a stop string is found in the text: detokenize must be true", "stop")
        if isinstance(self.allowed_token_ids, Collection) and not len(self.allowed_token_ids):
            raise InvalidRequest("allowed_token_ids is empty: no token could be drawn", "allowed_token_ids")
        _texts("bad_words", self.bad_words)
        return sampling.SamplingParams(
            max_tokens=min(longest, sampling.MAX_TOKENS) if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            allowed_token_ids=_ids("allowed_token_ids", self.allowed_token_ids),
            bad_words=bad_words,
            seed=seed_or_random(self.seed),
            stop_token_ids=_ids("stop_token_ids", self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=_num_logprobs("logprobs", self.logprobs, max_logprobs, vocab_size),
            prompt_logprobs=_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs, vocab_size),
            n=self.n,
            best_of=self.best_of or 0,
            beam_search=self.beam_search,
            guide=self._only_guide(),
            repetition_detection=self.repetition_detection,
            thinking_budget=self.thinking_budget,
            max_logprobs=max_logprobs,
        )

    def _only_guide(self) -> Guide | None:
        if self.structured_outputs is None:
            return self.guide
        check_type("structured_outputs", self.structured_outputs, StructuredOutputsParams)
        if self.guide is not None:
            raise InvalidRequest("guide and structured_outputs say the same: give one of them", "guide")
        return next(iter(self.structured_outputs.guides().values()))


@form_says_counterparts(OF_SAMPLING)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What ``LLM.beam_search`` looks for: the ``beam_width`` answers with the largest sum of log-probabilities divided
    by length ** ``length_penalty``."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect, as in vLLM: unmodified probabilities are ranked
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # no effect, as in vLLM: an end token stays among the tokens
    skip_special_tokens: bool = True
    early_stopping: bool = False  # end as soon as there are beam_width finished answers

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest."""
        sampling.check_range("beam_width", self.beam_width, 1, sampling.MAX_BEAMS)
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=0,
            beam_search=BeamSearch(self.length_penalty, self.early_stopping),
        )


def guides_of(
    json: Mapping[str, object] | str | None = None,
    json_object: bool | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
) -> dict[str, Guide]:
    """A guide for each that is given, by its name; a schema is an object, or its JSON text. Raises InvalidRequest."""
    given = {
        "json": (GuideKind.JSON_SCHEMA, json if json is None or isinstance(json, str) else _as_json(json)),
        "json_object": (GuideKind.JSON_OBJECT, "" if json_object else None),
        "regex": (GuideKind.REGEX, regex),
        "choice": (GuideKind.CHOICE, None if choice is None else _as_json(choice)),
        "grammar": (GuideKind.GRAMMAR, grammar),
    }
    return {name: Guide(kind, text) for name, (kind, text) in given.items() if text is not None}


def check_one_guide(guides: Mapping[str, Guide]) -> None:
    """Raises InvalidRequest for several, by the names of the fields that they come from."""
    if len(guides) > 1:
        raise InvalidRequest(f"an answer follows one guide: give only one of {', '.join(guides)}", next(iter(guides)))


def seed_or_random(seed: int | None) -> int:
    """64 bits: a random seed for None, and for -1, which is vLLM's word for it. Raises InvalidRequest."""
    if seed is None or seed == -1:
        return secrets.randbits(63)
    check_type("seed", seed, Integral, "a whole number")
    if not -(1 << 63) <= seed < 1 << 64:
        raise InvalidRequest(f"seed must be a 64-bit integer, got {shown(seed)}", "seed")
    return int(seed) & ((1 << 64) - 1)


def _num_logprobs(name: str, wanted: int | None, most: int, vocab_size: int) -> int | None:
    """Raises InvalidRequest for more than ``most``; other mistakes are left for the engine's own check to name."""
    if wanted is None or not issubclass(type(wanted), Integral) or wanted < -1:
        return wanted
    count = vocab_size if wanted == -1 else min(int(wanted), vocab_size)
    if count > most:
        what = "the whole vocabulary" if wanted == -1 else "more"
        allowed = f"{name} are at most {most} here, and {shown(int(wanted))} asks for {what}"
        raise InvalidRequest(f"{allowed}: in one process LLM(…, max_logprobs={shown(int(wanted))}) allows it", name)
    return count


def _as_json(value: object) -> str:
    if hasattr(value, "model_json_schema"):  # Pydantic's
        raise InvalidRequest("a schema is an object, or its text: model_json_schema() of this class makes one", "guide")
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a guide is not JSON: {error}", "guide") from None


def _texts(name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    texts: object = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(texts, Collection) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a text or a list of texts, got {shown(given)}", name)
    return tuple(texts)


def _ids(name: str, given: Collection[int] | None) -> tuple[int, ...]:
    """What is no collection is left for the engine's own check to name. Raises InvalidRequest."""
    if not isinstance(given, Collection):
        return () if given is None else given
    if not all(issubclass(kind, Integral) for kind in set(map(type, given))):
        raise InvalidRequest(f"{name} are ids of tokens, whole numbers", name)
    return tuple(given)


def _biases(given: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    """By token id; of a mapping, ids may be texts, as in JSON. Raises InvalidRequest."""
    if isinstance(given, Mapping):
        try:
            return tuple(sorted((int(str(token_id)), bias) for token_id, bias in given.items()))
        except (TypeError, ValueError):
            raise InvalidRequest("logit_bias must map token ids to biases", "logit_bias") from None
    return () if given is None else tuple(given) if isinstance(given, Collection) else given
