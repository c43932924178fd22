"""Text to token ids and back, from tokenizer.json or tiktoken.model (from GGUF files: gguf/tokenizer.py). Torch-free.

User text is always encoded with control tokens disabled: a literal ``<|im_start|>`` in a prompt is a dozen characters
and opens no turn. Control tokens only come from the chat template (``chat_template``). Byte-level BPE (Llama 3,
Qwen, SmolLM2) and SentencePiece with byte fallback (Llama 2, Mistral) are supported.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from mooncake.errors import InvalidRequest, ModelError
from mooncake.json_file import MAX_JSON_BYTES, read_json
from mooncake.text.chat_template import ChatMessage, ChatTemplate, Piece
from mooncake.text.tiktoken_file import backend_from_tiktoken
from mooncake.types import TokenIds

LONG_TEXT_CHARS = 64 << 10  # longer texts should be tokenized in a thread; the interpreter is free meanwhile

TokenBytes = Callable[[str], bytes]
"""The UTF-8 bytes that a token's name in the vocabulary stands for."""


class Tokenizer:
    """One model's tokenizer. Thread-safe: after construction only a cache changes."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        control_ids: Mapping[str, int],
        bos_ids: Sequence[int],
        eos_ids: Sequence[int],
        named_tokens: Mapping[str, str],
        template: str = "",
        prefix: str = "",
        stripping: Collection[str] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        """``backend`` must have special tokens disabled in encoding. ``bos_ids`` are put before plain prompts, and
        ``end_ids`` behind texts that are whole (``ended``).
        ``named_tokens`` are those that the chat ``template``, its Jinja source ("": none), knows by name: bos_token, …

        ``prefix``, "" or a space, is put before every text that ``backend`` encodes, and before each run of a rendered
        chat that has no white space of its own there. ``stripping`` names control tokens behind which a chat's white
        space is dropped.

        Raises ModelError when plain text could still become a control token, when the backend cannot be decoded token
        by token, or for a template that cannot be used.
        """
        self._backend = backend
        self._continuing = _without_prefix_space(backend)
        self._prefix = prefix
        self._stripping = frozenset(stripping)
        self._control_ids = dict(control_ids)
        names = sorted(control_ids, key=len, reverse=True)  # of two that begin alike, the longer one is meant
        self._control_names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._bos = np.array(bos_ids, dtype=np.uint32)
        self._end = np.array(end_ids, dtype=np.uint32)
        self.named_tokens = dict(named_tokens)
        self._template = self._compiled(template) if template else None
        self._added = {token.content for token in backend.get_added_tokens_decoder().values()}
        self._token_bytes, self._strips_space = _decoding(backend)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids = tuple(eos_ids)
        self.special_ids = frozenset(self._control_ids.values())
        self._check_control_tokens()

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template itself describes tools, given the variable ``tools``."""
        return self._template is not None and self._template.takes_tools

    @property
    def template_source(self) -> str:
        """Source of the chat template; "" without one."""
        return "" if self._template is None else self._template.source

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template. Raises ModelError for one that cannot be used."""
        changed = copy.copy(self)
        changed._template = self._compiled(source)
        return changed

    def encode(self, text: str, add_special: bool = True) -> TokenIds:
        """Ids of plain text, after the begin-of-sequence token if the model asks for one, unless ``add_special`` is
        false. Raises InvalidRequest."""
        ids = self._text_ids(self._prefix + text if text else "", self._backend)
        return np.concatenate([self._bos, ids]) if add_special and len(self._bos) else ids

    def ended(self, ids: TokenIds) -> TokenIds:
        """A text's ids, and behind them what the model expects at the end of a text that nothing follows, such as one
        that is embedded."""
        return np.concatenate([ids, self._end]) if len(self._end) else ids

    def encode_rendered(self, text: str, add_special: bool = True) -> TokenIds:
        """As ``encode``, for text in which control tokens are what they spell: whoever sends it has rendered it. A
        begin-of-sequence token that it begins with is not put before it again."""
        at, pieces = 0, list[Piece]()
        for found in self._control_names.finditer(text):
            pieces += [Piece(text[at : found.start()]), Piece(found[0], is_control=True)]
            at = found.end()
        if not pieces:
            return self.encode(text, add_special)
        ids = self._ids_of([piece for piece in (*pieces, Piece(text[at:])) if piece.text])
        has_begin = np.array_equal(ids[: len(self._bos)], self._bos)
        return ids if has_begin or not add_special else np.concatenate([self._bos, ids])

    def encode_more(self, text: str) -> TokenIds:
        """Ids of a text that continues another one. Raises InvalidRequest."""
        return self._text_ids(text, self._continuing)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object] | None = None,
        continue_final: bool = False,
    ) -> TokenIds:
        """Ids of a conversation in the model's template, ready for the assistant's turn or, with ``continue_final``,
        for more of the last message. The template may also read the user's ``variables``.

        Special tokens of the template become ids, the same strings inside a message do not. The template alone decides
        about a begin-of-sequence token. Raises InvalidRequest: no template, or one that refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: give it one, or send a plain prompt", "messages")
        return self._ids_of(self._template.render(messages, variables, continue_final))

    def _ids_of(self, pieces: Iterable[Piece]) -> TokenIds:
        """Of a rendered text."""
        runs: list[TokenIds] = []
        before = None
        for piece in pieces:
            if piece.is_control:
                runs.append(np.array([self._control_ids[piece.text]], dtype=np.uint32))
            else:
                text = piece.text.lstrip() if before in self._stripping else piece.text
                prefix = self._prefix if text and not text[0].isspace() else ""
                runs.append(self._text_ids(prefix + text, self._continuing if before else self._backend))
            before = piece.text
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.uint32)

    def decode(self, ids: TokenIds | Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD; unknown ids are nothing."""
        data = b"".join(self.token_bytes(int(token_id), skip_special) for token_id in ids)
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self._strips_space else text

    def stream(self, skip_special: bool = True, kept: frozenset[str] = frozenset()) -> DetokenizeStream:
        """Decodes generated tokens one at a time. The text continues a prompt, so no leading space is removed. ``kept``
        names control tokens that ``skip_special`` does not skip."""
        ids = frozenset(token_id for name in kept if (token_id := self.control_id(name)) is not None)
        return DetokenizeStream(lambda token_id: self.token_bytes(token_id, skip_special and token_id not in ids))

    def control_id(self, name: str) -> int | None:
        """Id of a control token; None if there is none with this name."""
        return self._control_ids.get(name)

    def spelled_control(self, text: str) -> str:
        """A control token that ``text`` spells, as plain text; "" for none."""
        return next((name for name in self._control_ids if name in text), "")

    def only_token(self, text: str) -> int | None:
        """The token that is all of this text; None where several are."""
        control = self.control_id(text)
        if control is not None:
            return control
        ids = self.encode_more(text)
        return int(ids[0]) if len(ids) == 1 else None

    def token_id(self, name: str) -> int | None:
        """The token of this name in the vocabulary; None where there is none."""
        token_id: int | None = self._backend.token_to_id(name)
        return token_id

    def token_name(self, token_id: int) -> str:
        """A token's name in the vocabulary; "" for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes that one token adds to a text."""
        if skip_special and token_id in self.special_ids:
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            name = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            data = b"" if name is None else name.encode() if name in self._added else self._token_bytes(name)
            self._bytes[token_id] = data
        return data

    def exported(self) -> dict[str, str]:
        """Files by name, from which others make the same tokenizer: those of a Hugging Face folder. They know no
        texts whose control tokens are plain text, and put no prefix before a prompt that begins with white space."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self._prefix:
            prefixed = normalizers.Replace(Regex(r"\A(?=\S)"), self._prefix)
            backend.normalizer = normalizers.Sequence([prefixed, *filter(None, [backend.normalizer])])
        if len(self._bos) and backend.post_processor is None:
            [bos] = self._bos.tolist()
            begin = backend.id_to_token(bos)
            backend.post_processor = processors.TemplateProcessing(f"{begin}:0 $A:0", None, [(begin, bos)])
        tree = json.loads(backend.to_str())
        for token in tree["added_tokens"]:
            token["rstrip"] |= token["content"] in self._stripping
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.named_tokens}
        files = {"tokenizer.json": json.dumps(tree, ensure_ascii=False), "tokenizer_config.json": json.dumps(config)}
        return files | ({"chat_template.jinja": self.template_source} if self._template else {})

    def _text_ids(self, text: str, backend: tokenizers.Tokenizer) -> TokenIds:
        try:
            if len(text) > LONG_TEXT_CHARS:  # the library holds the GIL for one text, but not for a batch
                [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
            else:
                encoding = backend.encode(text, add_special_tokens=False)
            return np.array(encoding.ids, dtype=np.uint32)
        except (TypeError, UnicodeEncodeError):  # the library rejects such a str
            raise InvalidRequest("the text holds half of a surrogate pair, which is not a character") from None

    def _compiled(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, list(self._control_ids), self.named_tokens)

    def _check_control_tokens(self) -> None:
        for token in self._control_ids:
            if not self.special_ids.isdisjoint(self._backend.encode(token, add_special_tokens=False).ids):
                raise ModelError(f"this tokenizer makes the control token {token!r} out of plain text")


class DetokenizeStream:
    """Text of one growing answer. Constant work per token; a character split over tokens waits until it is complete."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, if any."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """End the stream. At most part of a character is left, which is not text: it is dropped."""
        self._decoder.reset()
        return ""


# From a Hugging Face folder


def tokenizer_from_hf(folder: Path, eos_ids: Sequence[int], template: str = "") -> Tokenizer:
    """Read tokenizer.json, or tiktoken.model, and what stands beside it; ``template`` replaces the model's own. Raises
    ModelError for what is missing, broken or unsupported."""
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    backend = _hf_backend(folder, config)
    special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
    control_ids = {token.content: i for i, token in special.items()}
    stripping = [token.content for token in special.values() if token.rstrip]
    bos_ids, end_ids = _surrounding_ids(backend)
    backend.encode_special_tokens = True
    named = {
        name: token for name in ("bos_token", "eos_token", "unk_token", "pad_token") if (token := _named(config, name))
    }
    source = template or _hf_template(folder, config)
    return Tokenizer(backend, control_ids, bos_ids, eos_ids, named, source, stripping=stripping, end_ids=end_ids)


def _hf_backend(folder: Path, config: Mapping[str, object]) -> tokenizers.Tokenizer:
    path, ranks = folder / "tokenizer.json", folder / "tiktoken.model"
    if not path.exists():
        if ranks.exists():
            return backend_from_tiktoken(ranks, config, {byte: char for char, byte in _BYTE_OF.items()})
        raise ModelError(f"there is no tokenizer in {folder}: tokenizer.json is missing")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a valid tokenizer: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    return backend


def _surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before a text, and behind it."""
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    starts = (at for at in range(len(whole)) if text and whole[at : at + len(text)] == text)
    start = next(starts, None)
    return ([], []) if start is None else (list(whole[:start]), list(whole[start + len(text) :]))


def _hf_template(folder: Path, config: Mapping[str, object]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {file}: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else ""


def _named(config: Mapping[str, object], name: str) -> str | None:
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


# Tokens to bytes


def _decoding(backend: tokenizers.Tokenizer) -> tuple[TokenBytes, bool]:
    """How token names become bytes, and whether encoding puts a space at the beginning of a whole text."""
    decoder = _state(backend.decoder)
    inner = decoder.get("decoders")
    steps = inner if isinstance(inner, list) else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if "ByteFallback" in kinds or kinds == ["Metaspace"]:
        strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
        return _sentencepiece_bytes, strips or kinds == ["Metaspace"]
    raise ModelError(f"this tokenizer decodes with {kinds}; only ByteLevel and SentencePiece with bytes are supported")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _without_prefix_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for text that follows a control token, where SentencePiece models put no space before it."""
    if not any(step.get("prepend_scheme") == "first" for step in _steps(_state(backend.pre_tokenizer))):
        return backend
    tree = json.loads(backend.to_str())
    for step in _steps(tree["pre_tokenizer"]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    changed = tokenizers.Tokenizer.from_str(json.dumps(tree))
    changed.encode_special_tokens = True
    return changed


def _state(component: pre_tokenizers.PreTokenizer | decoders.Decoder | None) -> dict[str, object]:
    """A part of a tokenizer as tokenizer.json spells it."""
    state = json.loads(component.__getstate__()) if component is not None else {}
    return state if isinstance(state, dict) else {}


def _steps(part: dict[str, object]) -> Iterable[dict[str, object]]:
    inner = part.get("pretokenizers")
    return inner if isinstance(inner, list) else [part]
