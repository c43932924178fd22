"""A tokenizer from a tiktoken.model, as Moonshot publishes for Moonlight and Kimi: byte-level BPE as a list of ranks.

tiktoken merges the neighbours whose union has the lowest rank, however they were formed. So every way to split a token
into two others becomes a merge with the token's rank. Torch-free.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from mooncake.errors import ModelError

MAX_BYTES = 64 << 20
MAX_TOKEN_BYTES = 1024  # each is split in all ways; the longest published ones are 128 spaces
RESERVED = 256  # ids after the ranks, for control tokens; most have no name

# The published pattern: runs of Han by themselves, words by case, numbers by three digits.
_HAN, _UPPER, _LOWER = r"\p{Han}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        rf"[{_HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^{_HAN}]]*[{_LOWER}&&[^{_HAN}]]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^{_HAN}]]+[{_LOWER}&&[^{_HAN}]]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def backend_from_tiktoken(
    path: Path, config: Mapping[str, object], byte_names: Mapping[int, str]
) -> tokenizers.Tokenizer:
    """``config`` is tokenizer_config.json, which names control tokens; ``byte_names`` how byte-level BPE spells bytes.
    Raises ModelError."""
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        raise ModelError(f"{path} belongs to a tokenizer that is not known; convert it to tokenizer.json")
    ranks = _read_ranks(path)

    def spelled(token: bytes) -> str:
        return "".join(byte_names[byte] for byte in token)

    vocab = {spelled(token): rank for token, rank in ranks.items()}
    merges = list(every_merge(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_control_tokens(backend, len(ranks), config)
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens in the order of their ranks, which count from 0."""
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise ModelError(f"{path} is not a list of tokens in base64 and their ranks") from None
    if list(ranks.values()) != list(range(len(pairs))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path} lacks ranks, or single bytes")
    if max(map(len, ranks)) > MAX_TOKEN_BYTES:
        raise ModelError(f"{path} has a token longer than {MAX_TOKEN_BYTES} bytes")
    return ranks


def every_merge(tokens: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All ways to split one of ``tokens`` (of a mapping, in the order of their ranks) into two others."""
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in tokens and token[cut:] in tokens:
                yield token[:cut], token[cut:]


def _add_control_tokens(backend: tokenizers.Tokenizer, first: int, config: Mapping[str, object]) -> None:
    """Adds ids in order, because the library assigns numbers itself."""
    given = config.get("added_tokens_decoder")
    named = given if isinstance(given, dict) else {}
    for token_id in range(first, first + RESERVED):
        token = named.get(str(token_id))
        token = token if isinstance(token, dict) else {}
        name = token.get("content")
        content = name if isinstance(name, str) else f"<|reserved_token_{token_id}|>"
        is_special = bool(token.get("special", True))
        added = AddedToken(content, special=is_special, normalized=False)
        (backend.add_special_tokens if is_special else backend.add_tokens)([added])
        if backend.token_to_id(content) != token_id:
            raise ModelError(f"the control token {content!r} is not the only token of that name")
