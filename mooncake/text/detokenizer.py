"""From tokens to the text that clients get: whole characters, cut before the first stop string.

Pure: no I/O, no clock. What is held back or cut depends only on the text, never on token boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake.errors import InvalidRequest
from mooncake.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 256


class TextPiece(msgspec.Struct, frozen=True):
    """New text of an answer. ``stopped``: a stop string was found, and no more text follows."""

    text: str
    stopped: bool = False


def check_stop(stop: Sequence[str]) -> None:
    """Raises InvalidRequest for empty, too long or too many stop strings."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in stop):
        raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters", "stop")


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words that an answer must not contain, both at the beginning of a word and inside one, that is
    with and without a leading space (as in vLLM, which omits the former if its number of tokens differs).

    Raises InvalidRequest for empty, too long or too many words.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad_words are allowed", "bad_words")
    bare = [word.lstrip() for word in words]
    if not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in bare):
        raise InvalidRequest(f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
    runs = (tokenizer.encode_more(text) for word in bare for text in (word, f" {word}"))
    return tuple(dict.fromkeys(tuple(run.tolist()) for run in runs))


class TextAssembler:
    """The text of one answer as it grows.

    Text that may be the beginning of a stop string is held back until that is decided, and nothing more. The stop
    string that is complete first ends the answer; if several end together, the one that begins first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """``include_stop``: the text ends with the stop string. Stop strings completed within the first ``min_tokens``
        tokens are ordinary text. ``kept`` is as in ``Tokenizer.stream``. Raises like ``check_stop``."""
        check_stop(stop)
        self._stream = tokenizer.stream(skip_special, kept)
        self.stopped_by = ""  # the stop string that was found
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._stopped = False
        self._protected = min_tokens  # tokens to come that cannot complete a stop string

    def push(self, token_id: int) -> TextPiece:
        """The text that this token adds to the answer; possibly none yet."""
        if self._stopped:
            return TextPiece("", stopped=True)
        self._protected -= 1
        return self._take(self._stream.push(token_id))

    def flush(self) -> TextPiece:
        """The rest: no token follows, so held-back text is released."""
        if self._stopped:
            return TextPiece("", stopped=True)
        piece = self._take(self._stream.flush())
        held, self._held = self._held, ""
        return TextPiece(piece.text + held, piece.stopped)

    def _take(self, new: str) -> TextPiece:
        if not self._stop:
            return TextPiece(new)
        text, known = self._held + new, len(self._held)
        if self._protected < 0 and (found := self._first_stop(text, known)) is not None:
            end, begin = found
            self._held, self._stopped, self.stopped_by = "", True, text[begin:end]
            return TextPiece(text[: end if self._include_stop else begin], stopped=True)
        held = self._open_chars(text)
        self._held = text[len(text) - held :]
        return TextPiece(text[: len(text) - held])

    def _first_stop(self, text: str, known: int) -> tuple[int, int] | None:
        """Where a stop string ends and begins, or None when none ends behind the ``known`` characters of ``text``."""
        places = ((text.find(stop, max(0, known + 1 - len(stop))), len(stop)) for stop in self._stop)
        return min(((at + length, at) for at, length in places if at >= 0), default=None)

    def _open_chars(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
