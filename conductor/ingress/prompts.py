"""What clients send as text, messages or token ids, as prompts that fit into the context.

It knows neither jobs nor where they run. Long texts are tokenized in threads, so that others need not wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import NamedTuple, TypeVar

import numpy as np

from conductor.ingress.served_model import ServedModel
from mooncake.errors import ContextTooLong, InvalidRequest, shown
from mooncake.guides import Guides
from mooncake.sampling import Guide
from mooncake.text.chat_template import ROLES, ChatMessage
from mooncake.text.detokenizer import bad_word_tokens
from mooncake.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from mooncake.threads import Threads
from mooncake.types import TokenIds

MAX_MESSAGES = 4096
MESSAGE_CHARS = 512  # a chat template takes as long for a message as a tokenizer for so many characters, at least

T = TypeVar("T")


class Keep(NamedTuple):
    """How many of a prompt's tokens are kept: its last ones, or its first."""

    num_tokens: int
    are_first: bool = False

    def of(self, tokens: TokenIds) -> TokenIds:
        return tokens[: self.num_tokens] if self.are_first else tokens[-self.num_tokens :]


class Prompts:
    """Call ``close`` when done."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        capacity_tokens: Callable[[], int],
        check_open: Callable[[], None],
    ) -> None:
        """``capacity_tokens`` returns the longest sequence the nodes have memory for; 0: not known yet. ``check_open``
        raises when nothing long should be started any more."""
        self.model = model
        self.tokenizer = tokenizer
        self._capacity_tokens = capacity_tokens
        self._check_open = check_open
        self._encode = tokenizer.encode_rendered if model.takes_rendered else tokenizer.encode
        self._guides = Guides(lambda: tokenizer, model.vocab_size)
        self._threads = Threads(2, "tokenize")

    @property
    def context_len(self) -> int:
        """Tokens of prompt plus answer: the lesser of the model's limit and the nodes' memory."""
        return min(self.model.max_model_len, self._capacity_tokens() or self.model.max_model_len)

    async def encode(
        self, text: str, param: str = "prompt", keep: Keep | None = None, add_special: bool = True
    ) -> TokenIds:
        """Token ids of a prompt, or those to ``keep``. Raises InvalidRequest (empty) or ContextTooLong."""
        if keep is None and await self._is_surely_too_long(text):
            raise self._too_long(f"a text of {len(text)} characters", param)
        tokens = await self._maybe_in_thread(len(text), lambda: self._encode(text, add_special))
        return self._fitting(tokens, param, keep)

    async def encode_whole(self, text: str, param: str, add_special: bool = True) -> TokenIds:
        """Token ids of a text without an answer. Raises like ``encode``."""
        if await self._is_surely_too_long(text):
            raise self._too_long(f"a text of {len(text)} characters", param, 0)
        tokens = await self._maybe_in_thread(len(text), lambda: self._encode(text, add_special))
        whole = self.tokenizer.ended(tokens) if add_special and len(tokens) else tokens
        return self._fitting(whole, param, num_answer=0)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        param: str = "messages",
        keep: Keep | None = None,
        variables: Mapping[str, object] | None = None,
        continue_final: bool = False,
        roles: Sequence[str] = ROLES,
    ) -> TokenIds:
        """Token ids of a conversation, ready for the assistant's turn, or with ``continue_final`` for more of the last
        message; or those of them to ``keep``. ``variables`` are for the chat template, which supports ``roles``.

        Raises InvalidRequest or ContextTooLong.
        """
        variables = {**self.model.chat_variables, **(variables or {})}
        if not messages:
            raise InvalidRequest("at least one message is needed", param)
        check_count(messages, param)
        for number, message in enumerate(messages):
            if message.role not in roles:
                known = ", ".join(roles)
                raise InvalidRequest(
                    f"the role {shown(message.role)} is not supported; known: {known}", f"{param}[{number}].role"
                )
        text = "".join(message.content + message.beside for message in messages) + _as_told(variables)
        if keep is None and await self._is_surely_too_long(text):
            raise self._too_long(f"a conversation of {len(text)} characters", param)
        tokens = await self._maybe_in_thread(
            len(text) + MESSAGE_CHARS * len(messages),
            lambda: self.tokenizer.encode_chat(messages, variables, continue_final),
        )
        return self._fitting(tokens, param, keep)

    def spelled_control(self, prompt: str | Sequence[object]) -> str:
        """What to know of a prompt, or the first of several, that begins as a chat template renders it, where that is
        plain text; "" for others. In ASCII."""
        text = prompt if isinstance(prompt, str) else next(iter(prompt), "")
        if self.model.takes_rendered or not isinstance(text, str):
            return ""
        if not (name := self.tokenizer.spelled_control(text[:MESSAGE_CHARS])):
            return ""
        plain = f"the prompt spells {name!a}, which is plain text in it"
        others = "prompts of token ids may have control tokens, and with conductor.rendered_prompts others, too"
        return f"{plain}: chats are rendered here; {others}"

    async def decode(self, tokens: TokenIds, skip_special: bool) -> str:
        return await self._maybe_in_thread(4 * len(tokens), lambda: self.tokenizer.decode(tokens, skip_special))

    async def check_guide(self, guide: Guide | None) -> None:
        """Raises InvalidRequest for an invalid guide: better here than on a node. A schema can take a while."""
        if guide is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._guides.compile, guide)

    def check_tokens(
        self, ids: Sequence[int], param: str = "prompt", keep: Keep | None = None, num_answer: int = 1
    ) -> TokenIds:
        """A client's own ids as an array, or those to ``keep``. Raises InvalidRequest (not in the vocabulary) or
        ContextTooLong, where they leave no room for an answer of ``num_answer`` tokens."""
        return self._fitting(self.as_tokens(ids, param), param, keep, num_answer)

    def to_keep(self, truncate_prompt_tokens: int | None, side: str | None, num_answer: int) -> Keep | None:
        """Which of a prompt's tokens to keep where ``side``, "right" or "left" (None), is cut; None: all. -1 tokens
        means as many as leave room for an answer of ``num_answer`` tokens. Raises InvalidRequest."""
        if side not in (None, "left", "right"):
            raise InvalidRequest(f"truncation_side must be left or right, got {shown(side)}", "truncation_side")
        if truncate_prompt_tokens is None:
            return None
        count, limit = truncate_prompt_tokens, self.context_len
        if count == -1:
            return Keep(max(1, limit - max(1, num_answer)), side == "right")
        if not 1 <= count <= limit:
            what = f"truncate_prompt_tokens must be -1 or between 1 and {limit}, got {shown(count)}"
            raise InvalidRequest(what, "truncate_prompt_tokens")
        return Keep(count, side == "right")

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of these words. Raises InvalidRequest."""
        return await self._maybe_in_thread(2 * sum(map(len, words)), lambda: bad_word_tokens(self.tokenizer, words))

    def as_tokens(self, ids: Sequence[int], param: str) -> TokenIds:
        """Raises InvalidRequest for an id that is not in the vocabulary."""
        vocab_size = self.model.vocab_size
        try:
            array = np.array(ids, dtype=np.int64)
        except OverflowError:
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", param) from None
        if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
            wrong = int(array[(array < 0) | (array >= vocab_size)][0])
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}, got {wrong}", param)
        return array.astype(np.uint32)

    def max_tokens(self, num_prompt: int, requested: int | None, default: int | None) -> int:
        """How many tokens an answer may have: the requested number, or the default, limited by the context.

        With ``default`` None: all that is left of the context.
        """
        room = self.model.max_model_len - num_prompt
        wanted = default if requested is None else requested
        return room if wanted is None else min(wanted, room)

    def check_room(self, num_prompt: int, requested: int | None, param: str) -> None:
        """Raises ContextTooLong when the context leaves fewer tokens than ``requested``: clients of OpenAI's API
        rely on getting them, and should not wait for a truncated answer."""
        context_len = self.context_len
        room = context_len - num_prompt
        if requested is not None and requested > room:
            left = f"{_context(context_len)}, and a prompt of {num_prompt} leaves {room}"
            raise ContextTooLong(f"{param} is {shown(requested)}: {left}", param)

    def close(self) -> None:
        """Drop the work that still waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _maybe_in_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= LONG_TEXT_CHARS:
            return work()
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _is_surely_too_long(self, text: str) -> bool:
        """Whether a cheap check settles that a text cannot fit: its beginning alone makes twice the tokens allowed.

        So a client cannot make us tokenize megabytes to learn what kilobytes show.
        """
        probe = max(16 * self.model.max_model_len, LONG_TEXT_CHARS)
        if len(text) <= 2 * probe:
            return False
        head = await self._maybe_in_thread(probe, lambda: self._encode(text[:probe]))
        return len(head) > 2 * self.model.max_model_len

    def _fitting(self, tokens: TokenIds, param: str, keep: Keep | None = None, num_answer: int = 1) -> TokenIds:
        if not len(tokens):
            raise InvalidRequest(f"the {'prompt' if num_answer else 'input'} is empty", param)
        if keep is not None:
            tokens = keep.of(tokens)
        if len(tokens) > (most := self.context_len - num_answer):
            raise self._too_long(f"{len(tokens)} tokens > {most} maximum", param, num_answer)
        return tokens

    def _too_long(self, what: str, param: str, num_answer: int = 1) -> ContextTooLong:
        limit = _context(self.context_len) + (", one of them for the answer" if num_answer else "")
        return ContextTooLong(f"prompt is too long: {what}; {limit}", param)


def _context(num_tokens: int) -> str:
    """In the words that clients look for: by them they tell a conversation to be shortened from a mistake. So they do
    by "prompt is too long: N tokens > M maximum"."""
    return f"this model's maximum context length is {num_tokens} tokens"


def check_count(messages: Sized, param: str) -> None:
    """Call it before they are looked at one by one. Raises InvalidRequest for too many."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", param)


def _as_told(variables: Mapping[str, object] | None) -> str:
    """Roughly what a chat template renders: tools and documents cost as much to render and tokenize as messages."""
    try:
        return json.dumps(variables, ensure_ascii=False) if variables else ""
    except (RecursionError, TypeError, ValueError):  # the template refuses them for the same reason
        return ""
