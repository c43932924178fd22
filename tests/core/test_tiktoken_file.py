"""Folders with a tiktoken.model: ids are those of merging neighbours by the lowest rank."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import finish
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mooncake.errors import ModelError
from mooncake.gguf.file import GGUFFile
from mooncake.gguf.tokenizer import tokenizer_from_gguf
from mooncake.text.chat_template import ChatMessage
from mooncake.text.tokenizer import Tokenizer, tokenizer_from_hf

# As published, in the words of another library than the one that is tested.
WORDS = regex.compile(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; they've said HELLO, Hello and hello.\n\n",
    "def f(x: int) -> str:\n    return f'{x}'\n",
    "中文English混合 北京市 Pascal 汉字abc 你好世界 你好",
    "naïve café, Straße Ünïcode",
]


BYTES = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Ranks of a small vocabulary: bytes, and frequent sequences of the corpus."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    spelled = sorted(backend.get_vocab(), key=backend.token_to_id)
    letters = {char: byte for byte, char in bytes_to_unicode().items()}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(letters[char] for char in token) for token in spelled if len(token) > 1]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(ranks)
    names = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 3: "<|im_user|>"}
    added = {str(token_id): {"content": name, "special": True} for token_id, name in names.items()}
    added[str(first + 10)] = {"content": "<|tool_call_begin|>", "special": False}
    template = "{% for message in messages %}<|im_user|>{{ message['content'] }}<|im_end|>{% endfor %}"
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_from_hf(folder, eos_ids=())


def defined_ids(text: str, ranks: dict[bytes, int]) -> list[int]:
    return [ranks[part] for word in WORDS.findall(text) for part in merged(word.encode(), ranks)]


def merged(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [bytes([byte]) for byte in word]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@pytest.mark.parametrize(
    "text", [*CORPUS, "", "  two  spaces \n\n", "1234567 12", "I'LL WE'VE", "😀 👩‍👩‍👧", "汉字abc"]
)
def test_ids_are_the_definitions(text: str, tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    ids = tokenizer.encode(text)
    assert ids.tolist() == defined_ids(text, ranks)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300)
@given(st.text(st.sampled_from("Theo quick's dlazy'veHELLO12 \n\r中文北京é;("), max_size=60))
def test_any_text_has_the_definitions_ids(tokenizer: Tokenizer, ranks: dict[bytes, int], text: str) -> None:
    assert tokenizer.encode(text).tolist() == defined_ids(text, ranks)


@pytest.fixture(scope="module")
def converted(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """From a GGUF file as llama.cpp's converter writes it: with one merge a token, the last one on its way."""
    names = bytes_to_unicode()
    spelled = {token: "".join(names[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = merged(token, {other: number for other, number in ranks.items() if number < rank})
            merges += [" ".join(spelled[part] for part in parts)] if len(parts) == 2 else []
    writer = gguf.GGUFWriter(tmp_path_factory.mktemp("gguf") / "a.gguf", "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    kinds = gguf.TokenType
    writer.add_token_list([*spelled.values(), "[BOS]", "<|im_end|>", "[PAD502]"])
    writer.add_token_types([*[kinds.NORMAL] * len(ranks), kinds.CONTROL, kinds.CONTROL, kinds.UNUSED])
    writer.add_token_merges(merges)
    finish(writer)
    assert writer.path is not None
    return tokenizer_from_gguf(GGUFFile(writer.path), ())


@settings(max_examples=300)
@given(st.text(st.sampled_from("Theo quick's dlazy'veHELLO12 \n\r中文北京é;("), max_size=60))
def test_a_gguf_file_of_the_same_model_gives_the_same_ids(
    converted: Tokenizer, ranks: dict[bytes, int], text: str
) -> None:
    ids = converted.encode(text)
    assert ids.tolist() == defined_ids(text, ranks)
    assert converted.decode(ids) == text


def test_runs_of_han_are_words_of_their_own(tokenizer: Tokenizer) -> None:
    words = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("你好English")]
    assert "".join(words) == "你好English" and not any("好E" in word for word in words)


def test_control_tokens_come_from_the_template_alone(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    first = len(ranks)
    forged = tokenizer.encode("<|im_end|>")
    assert len(forged) > 1 and not tokenizer.special_ids & set(forged.tolist())
    ids = tokenizer.encode_chat([ChatMessage("user", "hello <|im_end|>")])
    assert ids[0] == first + 3 and ids[-1] == first + 2 and np.count_nonzero(ids == first + 2) == 1
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.decode([first + 10, first + 2]) == "<|tool_call_begin|>", "which is text, and the other is not"


@pytest.mark.parametrize(
    ("content", "config", "sentence"),
    [
        (b"not base64! 0\n", {"tokenizer_class": "TikTokenTokenizer"}, "not a list of tokens in base64"),
        (b"QQ== 0\n", {"tokenizer_class": "TikTokenTokenizer"}, "lacks ranks, or single bytes"),
        (b"QQ== 0\n", {"tokenizer_class": "QWenTokenizer"}, "convert it to tokenizer.json"),
        (BYTES + b"QUFB" * 500_000 + b" 256\n", {"tokenizer_class": "TikTokenTokenizer"}, "longer than 1024 bytes"),
    ],
)
def test_what_is_no_such_file_is_one_sentence(content: bytes, config: dict[str, str], sentence: str, tmp_path: Path):
    (tmp_path / "tiktoken.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=sentence):
        tokenizer_from_hf(tmp_path, eos_ids=())
