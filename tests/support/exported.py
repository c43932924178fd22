"""A tokenizer as files for others: transformers reads them, and makes the same tokens of chats and prompts."""

from __future__ import annotations

from pathlib import Path

from mooncake.text.chat_template import ChatMessage
from mooncake.text.tokenizer import Tokenizer

CHATS = [
    [("user", "Hello, world!")],
    [("user", "  hello\n\nworld  1234 "), ("assistant", "naïve 😀"), ("user", "hello")],
]
TEXTS = ["Hello, world!", "hello world", "tabs\tand\nnew lines  1234567", "naïve café 😀 日本語"]


def check_exported(tokenizer: Tokenizer, folder: Path) -> None:
    """Those in ``TEXTS`` begin with a letter: see ``Tokenizer.exported``."""
    from transformers import AutoTokenizer

    folder.mkdir()
    for name, text in tokenizer.exported().items():
        (folder / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for chat in CHATS:
        messages = [{"role": role, "content": text} for role, text in chat]
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ours = tokenizer.encode_chat([ChatMessage(role, text) for role, text in chat])
        assert theirs.encode(rendered, add_special_tokens=False) == ours.tolist(), rendered
    for text in TEXTS:
        assert theirs.encode(text) == tokenizer.encode(text).tolist(), text
