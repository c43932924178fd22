"""The vocabulary in a GGUF file's metadata: its tokens, their types, and those with a role. Knows no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mooncake.errors import ModelError
from mooncake.gguf.file import GGUF


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``types[i]`` is that of ``tokens[i]``, as in the file."""

    tokens: Sequence[str]
    types: Sequence[int]

    def of_type(self, *wanted: TokenType) -> Mapping[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if self.types[i] in wanted}


def read_vocabulary(file: GGUF) -> Vocabulary:
    """Raises ModelError if the file has none."""
    tokens, types = strings(file, "tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    return Vocabulary(tokens, [int(kind) for kind in types])


def strings(file: GGUF, key: str) -> list[str]:
    """Raises ModelError if the key is missing or has another type."""
    value = file.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{file.path} lacks {key}, a list of strings")
    return [str(item) for item in value]


# Many files name only one of the tokens that end an answer; llama.cpp, too, knows the others by these names.
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|end_of_text|>", "<|user|>", "<|observation|>"),
)
_HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")  # with these, <|end|> ends a message of several


def end_ids(file: GGUF) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: of text, of a turn, or of a message to a tool."""
    named = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [i for i in named if isinstance(i, int)]
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        kinds = TokenType.CONTROL, TokenType.USER_DEFINED
        special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in kinds}
        ends = _HARMONY_ENDS if all(token in special for token in _HARMONY_ENDS) else _ENDS
        ids += [special[name] for name in ends if name in special]
    return tuple(dict.fromkeys(ids))
