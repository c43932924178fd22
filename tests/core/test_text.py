"""The text of an answer: whatever its tokens, it ends before the first stop string and comes as early as it may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import InvalidRequest
from mooncake.text.detokenizer import MAX_STOP_CHARS, MAX_STOP_STRINGS, TextAssembler, TextPiece, bad_word_tokens
from mooncake.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_checkpoint("smollm2").load_tokenizer()


@pytest.fixture(scope="module")
def spelled(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens of this vocabulary by the text that they are."""
    found: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        found.setdefault(tokenizer.token_bytes(token_id).decode(errors="replace"), token_id)
    return found


def run(assembler: TextAssembler, ids: list[int]) -> list[TextPiece]:
    """Every piece up to the end, by a stop string or by flush."""
    pieces: list[TextPiece] = []
    for token_id in ids:
        pieces.append(assembler.push(token_id))
        if pieces[-1].stopped:
            return pieces
    return [*pieces, assembler.flush()]


def test_without_stop_strings_every_token_is_told_at_once(tokenizer: Tokenizer) -> None:
    pieces = run(TextAssembler(tokenizer), [int(i) for i in tokenizer.encode("The quick fox")])
    assert pieces == [TextPiece("The"), TextPiece(" quick"), TextPiece(" fox"), TextPiece("")]


def test_control_tokens_are_no_text_but_those_that_are_kept(tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.control_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert first is not None and second is not None and tokenizer.control_id("The") is None
    ids = [first, int(tokenizer.encode("The")[0]), second]
    for kept, text in ((frozenset[str](), "The"), (frozenset({"<|im_end|>", "<none>"}), "The<|im_end|>")):
        assert "".join(piece.text for piece in run(TextAssembler(tokenizer, kept=kept), ids)) == text


def test_a_stop_string_across_tokens_is_held_back_and_cut(tokenizer: Tokenizer, spelled: dict[str, int]) -> None:
    assembler = TextAssembler(tokenizer, ("\nUser:",))
    pieces = run(assembler, [spelled[text] for text in ("Yes", ".", "\n", "User", ":", " more")])
    assert pieces == [
        TextPiece("Yes"),
        TextPiece("."),
        TextPiece(""),
        TextPiece(""),
        TextPiece("", stopped=True),
    ]
    assert assembler.push(spelled[" more"]) == TextPiece("", stopped=True), "and nothing comes after it"
    assert assembler.flush() == TextPiece("", stopped=True)


def test_a_stop_string_may_be_the_end_of_the_text(tokenizer: Tokenizer) -> None:
    ids = [int(i) for i in tokenizer.encode("The quick fox jumps")]
    assert (
        "".join(piece.text for piece in run(TextAssembler(tokenizer, ("k fo",), include_stop=True), ids))
        == "The quick fo"
    )


def test_a_bad_word_is_spelled_within_a_word_and_at_its_beginning(tokenizer: Tokenizer) -> None:
    words = bad_word_tokens(tokenizer, ("fox", "  quick brown"))
    assert [tokenizer.decode(word) for word in words] == ["fox", " fox", "quick brown", " quick brown"]
    assert words == tuple(tuple(tokenizer.encode(tokenizer.decode(word)).tolist()) for word in words)


def test_a_false_alarm_is_let_go_as_soon_as_it_is_one(tokenizer: Tokenizer, spelled: dict[str, int]) -> None:
    pieces = run(TextAssembler(tokenizer, ("\nUser:",)), [spelled[text] for text in ("\n", "User", "s", "\n")])
    assert pieces == [TextPiece(""), TextPiece(""), TextPiece("\nUsers"), TextPiece(""), TextPiece("\n")]


def test_what_is_held_at_the_end_is_text(tokenizer: Tokenizer, spelled: dict[str, int]) -> None:
    assert run(TextAssembler(tokenizer, ("ab",)), [spelled["a"]]) == [TextPiece(""), TextPiece("a")]


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("cd",), "ab"),
        (("bcde", "cd"), "ab"),  # the one complete first, although the other begins before
        (("bcd", "cd"), "a"),  # both complete at once: the one that begins first
        (("e", "abcdef"), "abcd"),
        (("x", "f"), "abcde"),
    ],
)
@pytest.mark.parametrize("cut", range(1, 7))
def test_which_stop_string_wins_does_not_depend_on_tokens(
    tokenizer: Tokenizer, stop: tuple[str, ...], kept: str, cut: int
) -> None:
    text = "abcdef"
    ids = [int(i) for part in (text[:cut], text[cut:]) for i in tokenizer.encode(part)]
    pieces = run(TextAssembler(tokenizer, stop), ids)
    assert "".join(piece.text for piece in pieces) == kept
    assert pieces[-1].stopped


def first_stop(text: str, stop: tuple[str, ...], known: int = 0) -> str | None:
    """The reference, one character at a time: the text before the stop string that is complete first, after the first
    ``known`` characters."""
    for end in range(known + 1, len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


words = st.text(alphabet="aab\né", min_size=1, max_size=5)


@settings(max_examples=500)
@given(parts=st.lists(words, max_size=12), stop=st.lists(words, max_size=4).map(tuple))
def test_any_cut_into_tokens_gives_the_same_text(tokenizer: Tokenizer, parts: list[str], stop: tuple[str, ...]) -> None:
    text = "".join(parts)
    pieces = run(TextAssembler(tokenizer, stop), [int(i) for part in parts for i in tokenizer.encode(part)])
    expected = first_stop(text, stop)
    assert "".join(piece.text for piece in pieces) == (text if expected is None else expected)
    assert pieces[-1].stopped == (expected is not None)


@settings(max_examples=500)
@given(parts=st.lists(words, max_size=12), stop=st.lists(words, max_size=4).map(tuple), min_tokens=st.integers(0, 12))
def test_a_stop_string_within_the_tokens_that_an_answer_must_have_is_text(
    tokenizer: Tokenizer, parts: list[str], stop: tuple[str, ...], min_tokens: int
) -> None:
    ids = [int(i) for part in parts for i in tokenizer.encode(part)]
    free = TextAssembler(tokenizer)
    known = sum(len(free.push(token_id).text) for token_id in ids[:min_tokens])
    pieces = run(TextAssembler(tokenizer, stop, min_tokens=min_tokens), ids)
    expected = first_stop("".join(parts), stop, known)
    assert "".join(piece.text for piece in pieces) == ("".join(parts) if expected is None else expected)
    assert pieces[-1].stopped == (expected is not None)


@settings(max_examples=300)
@given(text=st.text(alphabet="ab", max_size=12), stop=st.lists(words, min_size=1, max_size=4).map(tuple))
def test_no_more_is_held_back_than_may_become_a_stop_string(
    tokenizer: Tokenizer, spelled: dict[str, int], text: str, stop: tuple[str, ...]
) -> None:
    assembler = TextAssembler(tokenizer, stop)
    told = ""
    for end, char in enumerate(text, 1):
        piece = assembler.push(spelled[char])
        told += piece.text
        if piece.stopped:
            return
        held = text[len(told) : end]
        assert text.startswith(told)
        assert held == "" or any(word.startswith(held) for word in stop)


SENSELESS = {
    "empty": ("",),
    "one of two empty": ("ok", ""),
    "too long": ("x" * (MAX_STOP_CHARS + 1),),
    "too many": tuple("abcdefghijklmnopq"),
}


@pytest.mark.parametrize("stop", SENSELESS.values(), ids=SENSELESS)
def test_stop_strings_that_make_no_sense_are_refused(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TextAssembler(tokenizer, stop)
    assert refused.value.param == "stop"


def test_the_largest_stop_strings_allowed_work(tokenizer: Tokenizer, spelled: dict[str, int]) -> None:
    stop = tuple("a" * (MAX_STOP_CHARS - 1) + chr(ord("b") + number) for number in range(MAX_STOP_STRINGS))
    pieces = run(TextAssembler(tokenizer, stop), [spelled["a"]] * 300 + [spelled["c"], spelled["a"]])
    assert "".join(piece.text for piece in pieces) == "a" * (300 - MAX_STOP_CHARS + 1)
    assert pieces[-1].stopped
