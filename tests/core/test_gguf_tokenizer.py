"""Tokenizers out of GGUF files: SentencePiece by its definition and as transformers reads it, every way to cut words,
and the tokens that end an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from exported import check_exported
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import MERGES, TOKENS, add_metadata, finish, write_gguf
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.gguf.file import GGUFFile
from mooncake.gguf.tokenizer import tokenizer_from_gguf
from mooncake.gguf.tokens import end_ids
from mooncake.gguf.words import words_of
from mooncake.text.chat_template import ChatMessage
from mooncake.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = list("▁abcdehlorw.")
PIECES = [
    "he",
    "▁h",
    "ll",
    "▁he",
    "lo",
    "hell",
    "▁hell",
    "▁hello",
    "or",
    "▁w",
    "ld",
    "orld",
    "▁world",
    "▁▁",
    "aa",
    "aaaa",
]
TEXTS = [
    *("hello world", " hello", "  hello   world  ", "", " ", "hellohello", "aaaaaaa aaa", "held", "a.b.c"),
    *("é😀 hello", "hello\n\nworld\t.", "x" * 50, "<s>hello</s>", "▁hello", "hello  <tag> <tag>"),
]


def write(path: Path, architecture: str = "llama", **metadata: Any) -> GGUFFile:
    """A file without tensors. Of the metadata, names stand for keys below ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        add_metadata(writer, key, value)
    finish(writer)
    return GGUFFile(path)


def sentencepiece(
    scores: Mapping[str, float], control: Sequence[str] = ("<s>", "</s>"), user_defined: Sequence[str] = ()
) -> dict[str, Any]:
    """Metadata of a vocabulary of pieces with scores: <unk>, control tokens, bytes, then those."""
    tokens = ["<unk>", *control, *user_defined, *BYTES, *scores]
    types = [UNKNOWN, *[CONTROL] * len(control), *[USER_DEFINED] * len(user_defined), *[BYTE] * 256]
    others = len(types)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [0.0] * others + [float(score) for score in scores.values()],
        "token_type": types + [NORMAL] * len(scores),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


SCORES = {piece: -float(rank) for rank, piece in enumerate(PIECES)} | {
    letter: -100.0 - number for number, letter in enumerate(LETTERS)
}


def by_definition(metadata: Mapping[str, Any], text: str, prefix: str) -> list[int]:
    """SentencePiece's algorithm as it is described: user-defined pieces stand alone, the longest first; elsewhere the
    neighbours that make the piece with the highest score become it, the leftmost first; what is no piece becomes
    bytes."""
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    scores = {t: s for t, s, kind in zip(tokens, metadata["scores"], kinds, strict=True) if kind == NORMAL}
    defined = sorted((t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED), key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, defined)) or '(?!)'})", prefix + text):
        if part in defined:
            ids.append(tokens.index(part))
            continue
        for piece in merged(part.replace(" ", "▁"), scores):
            names = [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
            ids += [tokens.index(name) for name in names]
    return ids


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    parts = list(text)
    while True:
        options = [
            (-scores[parts[at] + parts[at + 1]], at)
            for at in range(len(parts) - 1)
            if parts[at] + parts[at + 1] in scores
        ]
        if not options:
            return parts
        at = min(options)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def ids_of(tokenizer: Tokenizer, text: str, add_special: bool = False) -> list[int]:
    return [int(i) for i in tokenizer.encode(text, add_special)]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_is_what_its_definition_says(tmp_path: Path, has_prefix: bool) -> None:
    metadata = sentencepiece(SCORES, user_defined=["<tag>", "  "])
    tokenizer = tokenizer_from_gguf(write(tmp_path / "a.gguf", **metadata, add_space_prefix=has_prefix), ())
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        if "<tag>" not in text and "  " not in text:
            assert ids == by_definition(metadata, text, " " if has_prefix and text else "")
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        assert ids_of(tokenizer, text, add_special=True) == [1, *ids]
        more = [int(i) for i in tokenizer.encode_more(text)]
        assert more == by_definition(metadata, text, ""), "text that continues another one has no prefix"


letters = st.text("▁abc", min_size=1, max_size=5)


@settings(max_examples=300)
@given(
    pieces=st.lists(letters.filter(lambda piece: len(piece) > 1), unique=True, max_size=12),
    text=st.text(" abcé", max_size=24),
)
def test_any_vocabulary_cuts_any_text_by_the_definition(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], text: str
) -> None:
    metadata = sentencepiece({piece: -float(rank) for rank, piece in enumerate([*pieces, *"▁abc"])})
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    tokenizer = tokenizer_from_gguf(write(path, **metadata), ())
    assert ids_of(tokenizer, text) == by_definition(metadata, text, " " if text else "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("architecture", ["phi3", "gemma2", "gemma3"])
def test_transformers_reads_the_same_file_alike(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoTokenizer

    is_gemma = architecture.startswith("gemma")
    specials = ["<bos>", "<eos>"] if is_gemma else ["<s>", "</s>"]
    metadata = sentencepiece(SCORES, specials) | {"padding_token_id": 0, "add_space_prefix": not is_gemma}
    write(tmp_path / "a.gguf", architecture, **metadata)
    write_gguf(tmp_path / "b.gguf")  # transformers asks for a model's configuration, too
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf", local_files_only=True)
    ours = tokenizer_from_gguf(GGUFFile(tmp_path / "a.gguf"), ())
    for text in TEXTS:
        if not any(token in text for token in specials):  # users' texts have no control tokens here
            assert ids_of(ours, text) == theirs.encode(text, add_special_tokens=False), text


def test_merges_of_gemma4_are_those_of_its_file(tmp_path: Path) -> None:
    """As transformers' own tokenizer has them, with spaces as letters and unknown ones as bytes."""
    from transformers import GemmaTokenizer

    merges = [
        "h e",
        "l l",
        "he ll",
        "o r",
        "▁ w",
        "▁ ▁",
        "hell o",
        "l d",
        "\n \n",
        "▁w or",
        "▁wor ld",
        "▁ hello",
        "a a",
    ]
    pieces = [*LETTERS, "\n", *("".join(merge.split(" ")) for merge in merges)]
    given = sentencepiece(dict.fromkeys(pieces, -1000.0), ["<bos>", "<eos>"], ["<|channel>"])
    metadata = given | {
        "model": "gemma4",
        "pre": None,
        "merges": merges,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    ours = tokenizer_from_gguf(write(tmp_path / "a.gguf", "gemma4", **metadata), ())
    vocab = {token: i for i, token in enumerate(metadata["tokens"])}
    theirs = GemmaTokenizer(vocab, [tuple(merge.split(" ")) for merge in merges])
    for text in TEXTS:
        ids = ids_of(ours, text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == text.replace("▁", " ")
        assert ids_of(ours, text, add_special=True) == [1, *ids]
    assert ids_of(ours, "hello<|channel>") == [vocab["hello"], vocab["<|channel>"]]
    assert len(ids_of(ours, "hello world\n\n")) == 3


TURNS = ["<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' }}"
    "{% else %}{{ '<|assistant|>\n' }}{% endif %}{{ m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def test_control_tokens_of_phi3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    """As its published tokenizer.json says ("rstrip"), of which a GGUF file has nothing."""
    chat = [ChatMessage("user", "hello"), ChatMessage("assistant", "world")]
    for architecture, newline in (("phi3", []), ("llama", ["<0x0A>"])):
        metadata = sentencepiece(SCORES, TURNS) | {"chat_template": TEMPLATE}
        tokenizer = tokenizer_from_gguf(write(tmp_path / "a.gguf", architecture, **metadata), ())
        tokens = metadata["tokens"]
        word = (lambda text: [f"▁{text}"]) if architecture == "phi3" else spelled
        expected = ["<s>", "<|user|>", *newline, *word("hello"), "<|end|>", *newline]
        expected += ["<|assistant|>", *newline, *word("world"), "<|end|>", *newline, "<|assistant|>", *newline]
        assert [tokens[i] for i in tokenizer.encode_chat(chat)] == expected


def spelled(text: str) -> list[str]:
    """Behind a line break there is no prefix."""
    return merged(text, SCORES)


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_others_make_the_same_tokens_with_its_files(tmp_path: Path, architecture: str, has_prefix: bool) -> None:
    metadata = sentencepiece(SCORES, TURNS) | {"chat_template": TEMPLATE, "add_space_prefix": has_prefix}
    check_exported(tokenizer_from_gguf(write(tmp_path / "a.gguf", architecture, **metadata), ()), tmp_path / "out")


def test_a_run_behind_a_control_token_begins_with_a_space_once(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}"
    tokens = sentencepiece(SCORES)["tokens"]
    for has_prefix, first in ((True, ["▁hello"]), (False, ["hell", "o"])):
        file = write(tmp_path / "a.gguf", **sentencepiece(SCORES), chat_template=source, add_space_prefix=has_prefix)
        tokenizer = tokenizer_from_gguf(file, ())
        runs = [tokens[i] for i in tokenizer.encode_chat([ChatMessage("user", text) for text in ("hello", " hello")])]
        assert runs == ["<s>", *first, "</s>", "<s>", "▁hello", "</s>"]


# Words


PUBLISHED = (
    *("gpt-2", "phi-2", "command-r", "qwen2", "deepseek-r1-qwen", "megrez", "llama-bpe", "llama3", "llama-v3"),
    *("falcon3", "falcon-h1", "lfm2", "qwen35", "dbrx", "smaug-bpe", "tekken", "gpt-4o", "llama4", "minimax-m2"),
)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_cut_as_the_model_of_that_name_was_published(pre: str) -> None:
    theirs = published_words(pre)
    cut, normalizer = words_of(pre)
    assert cut is not None
    for text in WORDS:
        ours = normalizer.normalize_str(text) if normalizer else text
        published = theirs.normalizer.normalize_str(text) if theirs.normalizer else text
        assert cut.pre_tokenize_str(ours) == theirs.pre_tokenizer.pre_tokenize_str(published), text


WORDS = [
    *("Hello, world!", "  two  spaces ", "don't we'll THEY'VE", "camelCaseWords HTTPServer", "x=1234567;\ny = 3.14"),
    *(
        "\n\n\t indented\r\n",
        "naïve e\u0301 Straße",
        "日本語のテキスト、中文",
        "½ ² Ⅷ ٣٤٥",
        "a/b//c !!??\n/x",
        "😀👩‍👩‍👧 ok",
    ),
]


def published_words(pre: str) -> Backend:
    from transformers import CohereTokenizer, GPT2Tokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in ("qwen2", "deepseek-r1-qwen"):
        return Qwen2Tokenizer().backend_tokenizer
    if pre == "qwen35":
        return Qwen3_5Tokenizer().backend_tokenizer
    if pre == "command-r":
        return CohereTokenizer().backend_tokenizer
    if pre in ("gpt-2", "phi-2"):
        return GPT2Tokenizer().backend_tokenizer
    backend = Backend(models.BPE())
    pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[pre])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return backend


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("starcoder", "ab12 3", ["ab", "1", "2", " ", "3"]),
        ("refact", "ab12 3", ["ab", "1", "2", " ", "3"]),
        ("falcon", "a1234567, b!! 12", ["a", "123", "456", "7", ",", " b", "!!", " ", "12"]),
        ("glm4", "abc 1234567!!\n", ["abc", " ", "123", "456", "7", "!!\n"]),
        ("deepseek-v3", "ab 1234中文字 x.foo\n", ["ab", " ", "123", "4", "中文字", " x", ".foo", "\n"]),
        (
            "deepseek-llm",
            "ab 12中文 éա, x.foo \n",
            ["ab", " ", "1", "2", "中文", " é", "ա", ",", " x", ".", "foo", " ", "\n"],
        ),
        ("deepseek-coder", "ab 12中文 éա, ა=$ \n", ["ab", " ", "1", "2", "中文", " éա", ",", " ", "ა", "=$ ", "\n"]),
        ("kimi-k2", "fooBar's 1234中文abc", ["foo", "Bar's", " ", "123", "4", "中文", "abc"]),
        ("bloom", "Hello, a(b|c) x..  y", ["Hello", ",", " a", "(", "b", "|", "c", ")", " x", ".. ", " y"]),
        ("seed-coder", "abc 12!!\n", ["abc", " ", "1", "2", "!!", "\n"]),
    ],
)
def test_words_of_models_that_transformers_has_no_class_for(pre: str, text: str, words: list[str]) -> None:
    cut, _ = words_of(pre)
    assert cut is not None
    found = [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)]
    assert found == words


def test_bytes_are_merged_in_the_words_of_the_file(tmp_path: Path) -> None:
    """tiny_gguf's vocabulary has 1 + 2 and 12 + 3: one name cuts digits apart, the other leaves three together."""
    assert ("1 2" in MERGES) and ("12 3" in MERGES)
    for pre, expected in (("gpt-4o", ["123"]), ("tekken", ["1", "2", "3"]), ("refact", ["1", "2", "3"])):
        write_gguf(tmp_path / "a.gguf", pre=pre)
        tokenizer = open_checkpoint(str(tmp_path / "a.gguf")).load_tokenizer()
        assert ids_of(tokenizer, "123") == [TOKENS.index(token) for token in expected]
        assert tokenizer.decode(tokenizer.encode("the 123")) == "the 123"


# Ends


@pytest.mark.parametrize(
    ("control", "named", "ends"),
    [
        (["<bos>", "<eos>", "<end_of_turn>"], {"eos": "<eos>"}, ["<eos>", "<end_of_turn>"]),
        (["<s>", "<|endoftext|>", "<|end|>"], {"eos": "<|endoftext|>"}, ["<|endoftext|>", "<|end|>"]),
        (
            ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<x>"],
            {"eos": "<|eot_id|>", "eot": "<|eot_id|>", "eom": "<|eom_id|>"},
            ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ),
        (
            ["<|return|>", "<|call|>", "<|endoftext|>", "<|end|>", "<|start|>"],
            {"eos": "<|return|>"},
            ["<|return|>", "<|call|>", "<|endoftext|>"],
        ),
        (["<a>", "<b>"], {}, []),
    ],
    ids=["Gemma", "Phi-3", "Llama 3", "gpt-oss", "none"],
)
def test_every_known_end_ends_an_answer(
    tmp_path: Path, control: list[str], named: dict[str, str], ends: list[str]
) -> None:
    metadata = sentencepiece(SCORES, control)
    del metadata["eos_token_id"]
    ids = {f"{name}_token_id": metadata["tokens"].index(token) for name, token in named.items()}
    found = end_ids(write(tmp_path / "a.gguf", **metadata, **ids))
    assert [metadata["tokens"][i] for i in found] == ends


def test_text_that_looks_like_an_end_is_none(tmp_path: Path) -> None:
    metadata = sentencepiece(SCORES | {"<|im_end|>": -1.0})
    assert end_ids(write(tmp_path / "a.gguf", **metadata)) == (2,)


# Files that cannot be used


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "bert"}, "of the kind 'bert' (tokenizer.ggml.model); supported: gpt2"),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens, a list of strings"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens"),
        ({"scores": None}, "tokenizer.ggml.scores does not fit tokenizer.ggml.tokens"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores does not fit tokenizer.ggml.tokens"),
        ({"scores": ["a"] * 300}, "tokenizer.ggml.scores does not fit tokenizer.ggml.tokens"),
        ({"model": "gpt2"}, "lacks tokenizer.ggml.merges, a list of strings"),
        (
            {"model": "gpt2", "pre": "viking", "merges": ["a b"]},
            "'viking' (tokenizer.ggml.pre), which is not supported",
        ),
        (
            {"model": "gpt2", "pre": "kimi-k2", "merges": ["a b"], "tokens": ["a" * 1025], "token_type": [1]},
            "has a token longer than 1024 bytes",
        ),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a q"]}, "the merges of the tokenizer in"),
        ({"model": "gemma4"}, "lacks tokenizer.ggml.merges, a list of strings"),
        ({"model": "gemma4", "merges": ["a  b"]}, "the merges of the tokenizer in"),
        ({"model": "gemma4", "merges": ["a q"]}, "the tokens of the tokenizer in"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    metadata = {key: value for key, value in (sentencepiece(SCORES) | changes).items() if value is not None}
    file = write(tmp_path / "a.gguf", **metadata)
    with pytest.raises(ModelError) as error:
        tokenizer_from_gguf(file, ())
    assert sentence in str(error.value) and str(file.path) in str(error.value)
