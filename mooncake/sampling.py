"""How the next token is chosen, in token ids alone: what travels between roles and computes.

Plain frozen data that refuses impossible values, naming the field. What users fill in, with texts, is
``mooncake.sampling_params``; who draws is ``mooncake.engine.decoding``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Integral, Real

from mooncake.errors import InvalidRequest, shown

MAX_TOKENS = 1 << 20  # of an answer
DEFAULT_MAX_TOKENS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 1024  # token sequences
MAX_BAD_WORD_TOKENS = 64  # of one
MAX_TOP_LOGPROBS = 20
MAX_ANSWERS = 128  # to one prompt
MAX_BEAMS = 32
MAX_GUIDE_CHARS = 1 << 16
MAX_PATTERN_TOKENS = 1024
MAX_PATTERN_COUNT = 1024
MAX_REPEATED_TOKENS = 1 << 14  # of one pattern, all its repetitions together


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the ``n`` most likely answers instead of sampling one; scores are divided by length **
    ``length_penalty``."""

    length_penalty: float = 1.0
    early_stopping: bool = False  # end as soon as there are n finished answers


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """End an answer whose last tokens are ``min_count`` times the same ``min_pattern_size`` to ``max_pattern_size``
    tokens: a model that loops would otherwise go on to ``max_tokens``. (vLLM's names and rule.)"""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most ``num_tokens`` of reasoning: then ``end`` follows, the token that closes it. The reasoning begins behind
    ``begin``, if the answer has that token, or, where it is None, with the answer."""

    num_tokens: int
    end: int
    begin: int | None = None


class GuideKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Guide:
    """The required form of an answer. ``text`` is the schema, the expression, a JSON list of choices or a grammar.

    ``lead`` is a grammar of what may precede it, such as a thought; the guide begins where it says ``@answer``.
    """

    kind: GuideKind
    text: str = ""
    lead: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, in tokens alone: what travels and computes. (Users fill in
    ``mooncake.sampling_params``.) Greedy when ``temperature`` is 0.

    ``logprobs`` is None for none, or the number of top alternatives wanted besides the chosen token (0 to
    ``max_logprobs``, which does not travel); ``prompt_logprobs`` likewise for the tokens of the prompt. ``seed`` is
    always set: if the user gives none, one is drawn. With ``n``, answer i uses the seed ``seed + i``; with ``best_of``
    that many are generated and the ``n`` most likely per token are kept.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # only these may be drawn; (): any
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences: the last token is not drawn after the others
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int = 0  # 0: n
    beam_search: BeamSearch | None = None  # over n beams; nothing is sampled then
    guide: Guide | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_budget: ThinkingBudget | None = None
    max_logprobs: int = MAX_TOP_LOGPROBS

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field, for any value of a wrong type or out of range."""
        check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, and max_tokens only {self.max_tokens}", "min_tokens"
            )
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_k", self.top_k, 0, 1 << 31)
        check_range("top_p", self.top_p, 0.0, 1.0)  # 0, which OpenAI allows too: the most likely token
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("seed", self.seed, 0, (1 << 64) - 1)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, self.max_logprobs)
        if self.prompt_logprobs is not None:
            check_range("prompt_logprobs", self.prompt_logprobs, 0, self.max_logprobs)
        check_range("n", self.n, 1, MAX_ANSWERS)
        if self.best_of:
            check_range("best_of", self.best_of, self.n, MAX_ANSWERS)
        if self.beam_search is not None:
            self._check_beams(self.beam_search)
        if self.guide is not None:
            self._check_guide(self.guide)
        if self.repetition_detection is not None:
            self._check_repetition(self.repetition_detection)
        if self.thinking_budget is not None:
            check_type("thinking_budget", self.thinking_budget, ThinkingBudget)
            check_range("thinking_budget", self.thinking_budget.num_tokens, 0, 1 << 20)
        check_type("stop_token_ids", self.stop_token_ids, Collection, "a list of token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed", "stop_token_ids")
        self._check_biases()
        self._check_forbidden()

    def _check_forbidden(self) -> None:
        check_type("allowed_token_ids", self.allowed_token_ids, Collection, "a list of token ids")
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_ALLOWED_TOKEN_IDS} allowed_token_ids are possible", "allowed_token_ids")
        check_type("bad_words", self.bad_words, tuple, "a tuple of tuples of token ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} token sequences of bad_words are possible", "bad_words")
        for word in self.bad_words:
            check_type("bad_words", word, tuple, "a tuple of tuples of token ids")
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")

    def _check_biases(self) -> None:
        try:
            pairs: list[tuple[object, float]] = [(token_id, bias) for token_id, bias in self.logit_bias]
        except (TypeError, ValueError):
            raise InvalidRequest("logit_bias must be pairs of a token id and its bias", "logit_bias") from None
        if len(pairs) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} logit_bias entries are allowed", "logit_bias")
        for token_id, bias in pairs:
            if not isinstance(token_id, Integral):
                raise InvalidRequest(f"logit_bias has token ids, whole numbers, got {shown(token_id)}", "logit_bias")
            check_range("logit_bias", bias, -100.0, 100.0)

    def _check_repetition(self, wanted: RepetitionDetection) -> None:
        name = "repetition_detection"
        check_type(name, wanted, RepetitionDetection)
        check_range(f"{name}.max_pattern_size", wanted.max_pattern_size, 1, MAX_PATTERN_TOKENS)
        check_range(f"{name}.min_pattern_size", wanted.min_pattern_size, 1, wanted.max_pattern_size)
        check_range(f"{name}.min_count", wanted.min_count, 2, MAX_PATTERN_COUNT)
        if (looked_at := wanted.max_pattern_size * wanted.min_count) > MAX_REPEATED_TOKENS:
            what = f"looks at {MAX_REPEATED_TOKENS} tokens at most (max_pattern_size times min_count)"
            raise InvalidRequest(f"{name} {what}, got {looked_at}", name)

    def _check_guide(self, guide: Guide) -> None:
        check_type("guide", guide, Guide)
        check_type("guide", guide.text, str, "a Guide with a text")
        check_type("guide", guide.lead, str, "a Guide with a lead that is a text")
        if len(guide.text) + len(guide.lead) > MAX_GUIDE_CHARS:
            raise InvalidRequest(f"a guide has at most {MAX_GUIDE_CHARS} characters", "guide")
        if self.ignore_eos or self.min_tokens:
            raise InvalidRequest("a guide decides when the answer ends: it excludes ignore_eos and min_tokens", "guide")

    def _check_beams(self, beams: BeamSearch) -> None:
        check_type("beam_search", beams, BeamSearch)
        check_range("n", self.n, 1, MAX_BEAMS)
        check_range("length_penalty", beams.length_penalty, -10.0, 10.0)
        if self.best_of not in (0, self.n):
            raise InvalidRequest("beam search ranks its n beams itself: best_of must be n", "best_of")
        if self.edits_logits:
            what = "penalties, logit_bias, allowed_token_ids, bad_words, min_tokens, guide or thinking_budget"
            raise InvalidRequest(f"beam search takes no {what}: it ranks unmodified probabilities", "n")
        if self.repetition_detection is not None:
            raise InvalidRequest("beam search takes no repetition_detection", "repetition_detection")

    def named_tokens(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Ids that must be in the vocabulary, with the field that names them."""
        yield "logit_bias", [token_id for token_id, _ in self.logit_bias]
        yield "allowed_token_ids", self.allowed_token_ids
        yield "bad_words", [token_id for word in self.bad_words for token_id in word]
        if (budget := self.thinking_budget) is not None:
            yield "thinking_budget", [budget.end] if budget.begin is None else [budget.begin, budget.end]

    @property
    def num_answers(self) -> int:
        """How many answers are generated."""
        return max(self.n, self.best_of)

    def for_answer(self, number: int) -> SamplingParams:
        """For one of several answers alone. The rule of seeds: answer ``number`` draws from ``seed + number``."""
        return replace(self, n=1, best_of=0, seed=(self.seed + number) % (1 << 64))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before (penalties)."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are modified before a token is chosen."""
        edits = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens or self.needs_history
        return bool(edits) or self.guide is not None or self.thinking_budget is not None


def check_type(name: str, value: object, kind: type, words: str = "") -> None:
    """Raises InvalidRequest unless ``value`` is one of ``kind``, which ``words`` describe to the user."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {words or f'a {kind.__name__}'}, got {shown(value)}", name)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest for what is not in range: with integer bounds, all but integers; NaN always."""
    if isinstance(low, int):
        check_type(name, value, Integral, "a whole number")
    else:
        check_type(name, value, Real, "a number")
    if not low <= value <= high:
        form = "d" if isinstance(low, int) else "g"
        raise InvalidRequest(f"{name} must be between {low:{form}} and {high:{form}}, got {shown(value)}", name)
