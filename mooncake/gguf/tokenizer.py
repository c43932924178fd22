"""Tokenizers from the metadata of GGUF files: byte-level BPE ("gpt2"), and SentencePiece with scores ("llama") or
merges ("gemma4"). Torch-free.

Files name a tokenizer's way to cut words and leave out its normalizer; both are known by that name
(``words``). SentencePiece vocabularies with scores come without merges; those follow from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from mooncake.errors import ModelError
from mooncake.gguf.file import GGUF
from mooncake.gguf.tokens import TokenType, Vocabulary, read_vocabulary, strings
from mooncake.gguf.words import KIMI, LLAMA3, TEKKEN, known_words, words_of
from mooncake.text.tiktoken_file import MAX_TOKEN_BYTES, every_merge
from mooncake.text.tokenizer import Tokenizer

_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADD_BOS, _ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
_ADD_SPACE = "tokenizer.ggml.add_space_prefix"
_MERGES = "tokenizer.ggml.merges"
_SPACE = "▁"
_RSTRIP_AFTER = ("phi3",)  # architectures whose control tokens take the white space behind them
_KEEPS_SPACE = ("<s>", "<unk>", "<|endoftext|>")  # but these


def tokenizer_from_gguf(file: GGUF, eos_ids: Sequence[int], template: str = "") -> Tokenizer:
    """Build the tokenizer that the metadata describes; ``template`` replaces the file's own. Raises ModelError."""
    kind = file.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelError(f"there is no tokenizer in {file.path}")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ModelError(
            f"the tokenizer of {file.path} is of the kind {kind!r} (tokenizer.ggml.model); supported: gpt2 (byte-level "
            "BPE), llama (SentencePiece), gemma4 (SentencePiece with merges)"
        )
    vocabulary, pre = read_vocabulary(file), str(file.get("tokenizer.ggml.pre") or "default")
    is_sentencepiece = kind == "llama"
    prefix = " " if is_sentencepiece and file.get(_ADD_SPACE) is not False else ""
    backend = _backend(file, kind, vocabulary, pre, has_prefix=bool(prefix))
    control_ids = vocabulary.of_type(TokenType.CONTROL)
    own = file.get("tokenizer.chat_template")
    source = template or (own if isinstance(own, str) else "")
    named = _named_ids(file, len(vocabulary.tokens))
    by_name = {name: vocabulary.tokens[token_id] for name, token_id in named.items()}
    adds_bos = file.get(_ADD_BOS)
    if adds_bos is None:  # converters omit it where llama.cpp has a default
        adds_bos = is_sentencepiece or pre in (*LLAMA3, *TEKKEN)
    bos_ids = [named["bos_token"]] if adds_bos is True and "bos_token" in named else []
    end_ids = [named["eos_token"]] if file.get(_ADD_EOS) is True and "eos_token" in named else []
    strips = is_sentencepiece and file.get("general.architecture") in _RSTRIP_AFTER
    stripping = control_ids.keys() - set(_KEEPS_SPACE) if strips else ()
    return Tokenizer(backend, control_ids, bos_ids, eos_ids, by_name, source, prefix, stripping, end_ids)


def _backend(file: GGUF, kind: str, vocabulary: Vocabulary, pre: str, has_prefix: bool) -> tokenizers.Tokenizer:
    if kind == "llama":
        backend = _sentencepiece(file, vocabulary, _merges_by_score(file, vocabulary), has_prefix)
    elif kind == "gemma4":
        backend = _sentencepiece(file, vocabulary, _pairs(strings(file, _MERGES), str(file.path)), has_prefix)
    else:
        backend = _byte_level_bpe(vocabulary, strings(file, _MERGES), pre, str(file.path))
    backend.add_tokens([_added(token, False) for token in vocabulary.of_type(TokenType.USER_DEFINED)])
    backend.add_special_tokens([_added(token, True) for token in vocabulary.of_type(TokenType.CONTROL)])
    backend.encode_special_tokens = True
    return backend


def _named_ids(file: GGUF, vocab_size: int) -> dict[str, int]:
    """Of the special tokens that the file names."""
    given = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    return {name: value for name, value in given.items() if isinstance(value, int) and 0 <= value < vocab_size}


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], pre: str, source: str) -> tokenizers.Tokenizer:
    """Kimi's merges are all that make a token, as in its tiktoken.model; files have one for each."""
    cut, normalizer = words_of(pre)
    if cut is None:
        raise ModelError(
            f"{source} uses the pre-tokenizer {pre!r} (tokenizer.ggml.pre), which is not supported; "
            f"supported: {', '.join(known_words())}"
        )
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    ranks = vocabulary.of_type(TokenType.NORMAL) if pre in KIMI else {}
    if max(map(len, ranks), default=0) > MAX_TOKEN_BYTES:
        raise ModelError(f"the tokenizer in {source} has a token longer than {MAX_TOKEN_BYTES} bytes")
    pairs = list(every_merge(ranks)) if pre in KIMI else _pairs(merges, source)
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in (*LLAMA3, *TEKKEN, *KIMI)))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the merges of the tokenizer in {source} are broken: {error}") from None
    backend.pre_tokenizer = cut
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: Sequence[str], source: str) -> list[tuple[str, str]]:
    found = [tuple(merge.split(" ")) for merge in merges]
    if wrong := next((pair for pair in found if len(pair) != 2), None):
        raise ModelError(f"the merges of the tokenizer in {source} are broken: {wrong!r:.80}")
    return [(pair[0], pair[1]) for pair in found]


# SentencePiece (Kudo and Richardson 2018), of the kind BPE


def _sentencepiece(
    file: GGUF, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], has_prefix: bool
) -> tokenizers.Tokenizer:
    """``has_prefix``: texts are encoded with a space before them, which decoding removes."""
    unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(vocab, list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = tokenizers.Tokenizer(model)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the tokens of the tokenizer in {file.path} are broken: {error}") from None
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend


def _merges_by_score(file: GGUF, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, in SentencePiece's order: the piece with the highest score first.

    Of one piece's ways the one with the longer left part comes first, as in published tokenizer.json. Raises ModelError
    if there are not as many scores as tokens.
    """
    scores = file.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    pieces = {token: float(scores[i]) for token, i in vocabulary.of_type(TokenType.NORMAL).items()}
    found = [
        (-score, -at, piece[:at], piece[at:])
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]
