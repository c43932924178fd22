"""Guided answers: which tokens may follow, so that an answer matches a schema, an expression, a choice or a grammar.

The grammar engine is llguidance. What is allowed depends only on the guide and the tokens generated so far, so any node
can take over an answer. This module knows neither sequences, samplers nor torch.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from mooncake.closed_objects import closed
from mooncake.errors import InvalidRequest
from mooncake.guide_limits import check_grammar, check_schema
from mooncake.sampling import Guide, GuideKind
from mooncake.text.tokenizer import Tokenizer
from mooncake.types import TokenIds

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 64  # compiled guides kept
# Limit on parser states at one token, which are computed on the thread that generates all tokens. Usual schemas and
# grammars have a few hundred, those with hundreds of cases some thousand; ambiguous ones have more with every
# token, and each takes longer.
MAX_READINGS = 5000

_SPACING: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As by json.dumps: where arbitrary white space is allowed, a small model can write it for ever."""


class Guides:
    """Compiles guides for one vocabulary and caches the latest ones. Thread-safe; the tokenizer is read at first use.

    Each guide is compiled once, by the first caller; others that want it wait for that, and for no other guide.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """``vocab_size`` is the model's, which may have more rows than the tokenizer has tokens."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # never held for long
        self._reading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Guide, Future[LLMatcher]] = OrderedDict()  # compiled, or being compiled

    def compile(self, guide: Guide) -> None:
        """Compile it in advance: the first use of a vocabulary takes some tenths of a second, and so does a complex
        schema.

        Raises InvalidRequest when the guide is invalid, or would take too long.
        """
        self._matcher(guide)

    def state(self, guide: Guide) -> GuideState:
        """The state at the beginning of an answer. Raises InvalidRequest."""
        matcher = self._matcher(guide)
        with self._lock:
            return GuideState(matcher.deep_copy(), self._vocab_size)

    def _matcher(self, guide: Guide) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.get(guide)
            is_first = compiled is None
            if compiled is None:
                compiled = self._compiled[guide] = Future()
            self._compiled.move_to_end(guide)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if is_first:
            try:
                compiled.set_result(self._compile(guide))
            except BaseException as error:
                with self._lock:
                    if self._compiled.get(guide) is compiled:
                        del self._compiled[guide]
                compiled.set_exception(error)
        return compiled.result()

    def _compile(self, guide: Guide) -> LLMatcher:
        grammar = _whole_grammar(guide)
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._load_tokenizer(), self._vocab_size)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(step_max_items=MAX_READINGS))
        if matcher.is_error():
            raise InvalidRequest(f"the {guide.kind} guide is not valid: {_sentence(matcher.get_error())}", "guide")
        GuideState(matcher.deep_copy(), self._vocab_size).allowed()  # raises when no answer is possible
        return matcher


class GuideState:
    """The state of one answer in its guide."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)
        self._vocab_size = vocab_size
        self._num_tokens = 0

    def follow(self, answer: TokenIds) -> None:
        """Advance the state to the end of ``answer``, of which it may have seen a part."""
        if len(answer) < self._num_tokens:  # speculation that failed
            self._matcher.rollback(self._num_tokens - len(answer))
        else:
            self._matcher.consume_tokens(answer[self._num_tokens :].tolist())
        self._num_tokens = len(answer)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Mask by token id; only tokens that end the answer once the guide is complete.

        Raises InvalidRequest when the guide cannot be followed any further.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():  # an earlier or new error: the mask then only allows the end
            raise InvalidRequest(f"the guide cannot be followed any further: {_reason(self._matcher)}", "guide")
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        return bits.view(np.bool_)


def _reason(matcher: LLMatcher) -> str:
    """Its error in one line: the other lines are its whole state."""
    reason = matcher.get_error().partition("\n")[0][:500]
    return "no text can satisfy it" if reason == "NoExtensionBias" else reason


def _whole_grammar(guide: Guide) -> str:
    """With its lead, in llguidance's own format. Raises InvalidRequest."""
    grammar = _grammar(guide)
    if not guide.lead:
        return grammar
    check_grammar(guide.lead)
    is_tree = guide.kind is not GuideKind.GRAMMAR and grammar.startswith("{")
    answer = json.loads(grammar)["grammars"][0] if is_tree else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": guide.lead}, answer | {"name": "answer"}]})


def _grammar(guide: Guide) -> str:
    """Without its lead. Raises InvalidRequest."""
    try:
        match guide.kind:
            case GuideKind.JSON_OBJECT:
                return _json_grammar('{"type": "object"}')
            case GuideKind.JSON_SCHEMA:
                return _json_grammar(guide.text)
            case GuideKind.CHOICE:
                choices = json.loads(guide.text)
                if not isinstance(choices, list) or not choices or not all(map(_is_text, choices)):
                    raise ValueError("a choice is a list of texts")
                return grammar_from("choice", guide.text)
            case GuideKind.REGEX:
                return grammar_from("regex", guide.text)
            case GuideKind.GRAMMAR:
                check_grammar(guide.text)
                return grammar_from("grammar", guide.text)
    except InvalidRequest:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the {guide.kind} guide is not valid: {_sentence(str(error))}", "guide") from None


def _is_text(choice: object) -> bool:
    return isinstance(choice, str) and choice != ""


def _sentence(report: str) -> str:
    """The grammar engine's message, without the drawing of the position."""
    return " ".join(line for line in report.splitlines() if line and not line.startswith(" "))[:500]


def _json_grammar(schema: str) -> str:
    parsed = json.loads(schema)
    check_schema(parsed)
    return LLMatcher.grammar_from_json_schema(json.dumps(closed(parsed)), defaults=_SPACING)


def inline_schema(schema: dict[str, object]) -> str:
    """What a guide of ``schema`` allows, for use in a grammar."""
    return f"%json {json.dumps(closed(schema) | {'x-guidance': _SPACING})}"


class _Vocabulary:
    """The attributes by which llguidance reads a tokenizer. Rows of the model without a token have no bytes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id, skip_special=False) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer
        self._num_leading = len(tokenizer.encode(""))  # tokens put before every prompt

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text only")
        ids: Sequence[int] = self._tokenizer.encode(text).tolist()[self._num_leading :]
        return list(ids)


def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    if not tokenizer.eos_ids:
        raise InvalidRequest("this model has no token that ends an answer, and a guide needs one", "guide")
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    return LLTokenizer(wrapper, eos_token=list(tokenizer.eos_ids))
