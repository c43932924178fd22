"""Results of a batch that took several runs: each request has one, in its place, and no answer is lost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from mooncake.app.batch_results import BatchAnswer, BatchResults
from mooncake.errors import ConfigError

IDS = ["a", "b", "c", "d"]


def answer(custom_id: str, status: int = 200, body: object = "said") -> BatchAnswer:
    return BatchAnswer(custom_id, status, "req", body)


def write(path: Path, answers: Iterable[BatchAnswer]) -> set[str]:
    """Returns what was answered before."""
    with closing(BatchResults(path, IDS)) as results:
        for each in answers:
            results.add(each)
        return set(results.answered)


def told(path: Path) -> list[tuple[str, int | None]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["custom_id"], each["response"] and each["response"]["status_code"]) for each in results]


def test_what_was_refused_or_not_answered_is_asked_again_and_goes_to_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write(out, [answer("a"), answer("b", 0), answer("c", 400), answer("d")]) == set()
    assert told(out) == [("a", 200), ("b", None), ("c", 400), ("d", 200)]
    first, *_, last = out.read_bytes().splitlines()
    assert write(out, [answer("b"), answer("c", 400)]) == {"a", "d"}
    assert told(out) == [("a", 200), ("b", 200), ("c", 400), ("d", 200)]
    assert (out.read_bytes().splitlines()[0], out.read_bytes().splitlines()[3]) == (first, last)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_cut_of_the_file_keeps_its_whole_lines(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, [answer("a", body="ä"), answer("b"), answer("c")])
    whole = out.read_bytes()
    for size in range(0, len(whole), 7):
        out.write_bytes(whole[:size])
        num_whole = whole[:size].count(b"\n")
        assert write(out, [answer(each) for each in IDS[num_whole:]]) == set(IDS[:num_whole])
        assert told(out) == [(each, 200) for each in IDS]


def test_an_answer_that_is_no_unicode_stays_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, [answer("a", body={"text": "\ud83d"})])
    assert json.loads(out.read_text())["response"]["body"] == {"text": "\ud83d"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello\n", "out, line 1 is not a result"),
        ('{"custom_id": "a"}\n', "out, line 1 is not a result"),
        ('{"custom_id": [], "response": null}\n', "out, line 1 is not a result"),
        (f"{answer('other').line}\n", "no request has the custom_id 'other'"),
        (f"{answer('a').line}\n{answer('a').line}\n", "two results of one custom_id"),
    ],
)
def test_another_file_is_left_as_it_was(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "out").write_text(text)
    with pytest.raises(ConfigError, match=words):
        BatchResults(tmp_path / "out", IDS)
    assert (tmp_path / "out").read_text() == text


def test_two_runs_do_not_write_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, [answer("a", 500)])
    with closing(BatchResults(out, IDS)) as results:  # has replaced the file
        with pytest.raises(ConfigError, match="another run writes its results"):
            BatchResults(out, IDS)
        results.add(answer("a"))
    assert told(out) == [("a", 200)]


def test_results_may_go_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert write(tmp_path / "pipe", [answer("b"), answer("a")]) == set()
    reader.join(10)
    assert [json.loads(line)["custom_id"] for line in read[0].splitlines()] == ["b", "a"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_results_for_which_there_is_no_room_are_named() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):  # noqa: SIM117
        with closing(BatchResults(Path("/dev/full"), IDS)) as results:
            results.add(answer("a"))
