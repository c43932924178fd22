"""``LLM.get_tokenizer()``: the model's tokenizer by the names that transformers' users know, and vLLM's.

Two things differ, because no text can forge control tokens here: in ``encode`` their names are plain text, and what
``apply_chat_template`` renders carries its token ids along, so that ``LLM.generate`` answers what was rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from mooncake.errors import InvalidRequest
from mooncake.in_process.inputs import Message, conversation_list, template_variables, with_template
from mooncake.text.chat_template import ChatMessage
from mooncake.text.tokenizer import Tokenizer
from mooncake.types import TokenIds

_ABSENT = {
    "batch_decode": "decode(ids) gives the text of one",
    "add_tokens": "a model's vocabulary stays as it is",
    "add_special_tokens": "a model's vocabulary stays as it is",
    "tokenize": "encode(text) gives ids, convert_ids_to_tokens(ids) their names",
    "all_special_ids": "special_ids has them",
    "get_vocab": "convert_tokens_to_ids(name) and convert_ids_to_tokens(id) look names up",
    "save_pretrained": "the model's folder has its files",
}
_OF_TRANSFORMERS = ("return_tensors", "return_dict", "padding", "truncation", "max_length")


class RenderedChat(str):
    """A conversation's text, with its ``token_ids``, which are what ``LLM.generate`` computes. A text made of it, such
    as a part, is a plain one again."""

    __slots__ = ("token_ids",)
    token_ids: TokenIds

    def __new__(cls, text: str, token_ids: TokenIds) -> RenderedChat:
        made = super().__new__(cls, text)
        made.token_ids = token_ids
        return made

    def __getnewargs__(self) -> tuple[str, TokenIds]:  # type: ignore[override]
        """For copies, and on the way to other processes."""
        return str(self), self.token_ids


class LLMTokenizer:
    """Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.special_ids = sorted(tokenizer.special_ids)

    def __call__(self, *texts: object, **options: object) -> NoReturn:
        raise TypeError("this tokenizer cannot be called: encode(text) gives the ids of one text")

    def __len__(self) -> int:
        return self.vocab_size

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> object:
            """Names of the tokens, and what stands for methods that only transformers' tokenizers have."""
            if name in ("bos_token", "eos_token", "pad_token", "unk_token"):
                return self._tokenizer.named_tokens.get(name)
            if name in ("bos_token_id", "pad_token_id", "unk_token_id"):
                return self._tokenizer.control_id(self._tokenizer.named_tokens.get(name.removesuffix("_id"), ""))
            reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
            raise AttributeError(f"this tokenizer has no {name!r}{reason}", name=name, obj=self)

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens that end an answer."""
        return next(iter(self._tokenizer.eos_ids), None)

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        return self._tokenizer.template_source or None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text; ``add_special_tokens`` puts those before it that the model asks for. Raises
        InvalidRequest."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens).tolist()
        return ids

    def decode(self, token_ids: int | Sequence[int] | TokenIds, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(np.atleast_1d(np.asarray(token_ids)), skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """By their names in the vocabulary; None for a name that is not in it."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        if isinstance(ids, int):
            return self._tokenizer.token_name(ids)
        return [self._tokenizer.token_name(each) for each in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        chat_template: str | Path | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[int] | RenderedChat | list[list[int]] | list[RenderedChat]:
        """One conversation, or each of several, in the model's template or that of ``chat_template`` (a file, or
        Jinja), as token ids or as text; ``LLM.generate`` takes either. ``tools`` are in OpenAI's form, ``variables``
        those of the template, such as ``enable_thinking``.

        Raises InvalidRequest: no template, one that refuses the messages, or an argument of transformers that has no
        meaning here.
        """
        for name in _OF_TRANSFORMERS:
            if variables.pop(name, None):
                what = "the result is a list of ids, or text"
                raise InvalidRequest(f"apply_chat_template takes no {name}: {what}", name)
        tokenizer = with_template(self._tokenizer, chat_template)
        given = template_variables(tokenizer, tools, variables, add_generation_prompt)
        found = [tokenizer.encode_chat(each, given, continue_final_message) for each in conversation_list(conversation)]
        is_one = isinstance(conversation[0], (ChatMessage, Mapping))
        if tokenize:
            ids = [each.tolist() for each in found]
            return ids[0] if is_one else ids
        texts = [RenderedChat(self._tokenizer.decode(each, skip_special=False), each) for each in found]
        return texts[0] if is_one else texts
