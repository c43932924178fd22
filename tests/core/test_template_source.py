"""A chat template of one's own: where its text comes from, and what becomes of the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ConfigError, ModelError
from mooncake.text.chat_template import ChatMessage
from mooncake.text.template_source import template_source

OWN = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role[0] }}: {{ m.content }}<|im_end|>{% endfor %}"
HELLO = [ChatMessage("user", "Hello <|im_end|>")]


def test_it_is_a_file_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (file, str(file), "~/own.jinja"):
        assert template_source(given, "it") == OWN + "\n"
    assert template_source(OWN, "it") == OWN
    assert template_source("{{ a }}\\nb", "it") == "{{ a }}\nb"  # one line of a shell
    assert template_source("{{ '\\n' }}\nb", "it") == "{{ '\\n' }}\nb"
    assert template_source(OWN * 100, "it") == OWN * 100  # longer than any path
    assert template_source("", "it") == template_source(None, "it") == ""


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe{")
    for given, sentence in (
        ("no/own.jinja", "it: cannot read no/own.jinja: No such file or directory; a template given as text has"),
        (Path("no/{own}.jinja"), "it: cannot read no/{own}.jinja: No such file or directory$"),
        (tmp_path, "it: cannot read .*: Is a directory$"),
        (tmp_path / "empty", "it: the template is empty"),
        (tmp_path / "binary", "it: .*binary is not text in UTF-8"),
        (7, "it is a file, or the text of a template, got 7"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            template_source(given, "it")  # type: ignore[arg-type]


def test_it_replaces_the_model_s_whatever_that_is(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "chat_template.jinja"
    for own in (file.read_text(), "{% for %}", ""):
        file.write_text(own) if own else file.unlink()
        tokenizer = open_checkpoint(str(tmp_path)).load_tokenizer(OWN)
        ids = tokenizer.encode_chat(HELLO).tolist()
        assert tokenizer.template_source == OWN
        assert tokenizer.decode(ids, skip_special=False) == (
            "<|endoftext|><|im_start|>u: Hello <|im_end|><|im_end|>"  # the begin token is known by its name
        )
        assert [each for each in ids if each in tokenizer.special_ids] == [ids[0], ids[1], ids[-1]]


def test_one_that_cannot_be_used_is_a_sentence() -> None:
    checkpoint = open_checkpoint("smollm2")
    with pytest.raises(ModelError, match="the chat template is broken"):
        checkpoint.load_tokenizer("{% for %}")
    plain = checkpoint.load_tokenizer()
    with pytest.raises(ModelError, match="builds control tokens out of parts"):
        plain.with_template("{% for m in messages %}{{ '<|' ~ 'im_start|>' }}{{ m.content }}{% endfor %}")
    other = plain.with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert other.decode(other.encode_chat(HELLO)) == HELLO[0].content != plain.decode(plain.encode_chat(HELLO))
