"""The file of results of ``mooncake run-batch``: each request is answered once, in however many runs.

It knows neither servers nor how requests are sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

from mooncake.app.outputs import writing
from mooncake.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    custom_id: str
    status: int  # 0: no server answered
    request_id: str
    body: object
    code: str = "unavailable"  # of the error, if none did

    @property
    def reason(self) -> str:
        """Why the request was not answered: the server's message if there is one."""
        said = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        return str(said.get("message", said) if isinstance(said, dict) else said)

    @property
    def line(self) -> str:
        """As OpenAI's result files have it."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        error = None if self.status else {"code": self.code, "message": self.body}
        result = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response if self.status else None,
            "error": error,
        }
        return json.dumps(result, ensure_ascii=False)


class _Result(NamedTuple):
    line: bytes
    custom_id: str
    is_answer: bool


class BatchResults:
    """A line for each result, in the order of the requests once it is closed (a pipe has them as they came). One
    process writes it at a time; close it.

    ``answered`` names the requests that earlier runs have answered. Results of those that were refused, or not
    answered, are dropped, and so is a line that an interrupt has cut: such requests are to be sent again. The file is
    replaced as a whole or appended to, so no moment is without the answers that were there.
    """

    def __init__(self, path: Path, custom_ids: Sequence[str]) -> None:
        """Raises ConfigError when another run writes the file, and when it holds anything but results of these
        requests: it stays as it is."""
        self._shown_path = path
        self._places = {custom_id: place for place, custom_id in enumerate(custom_ids)}
        self._is_regular = path.is_file() or not path.exists()  # else a pipe or a device
        self._path = path.resolve() if self._is_regular else path  # a pipe's link leads to no name
        self._file = _opened(self._path, "a" if self._is_regular else "w")
        try:
            _lock(self._file, path)
            if self._is_regular and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise ConfigError(f"another run writes its results to {path}")  # has just replaced the file
            results = self._read()
            kept = [result for result in results if result.is_answer]
            self._order = [self._places[result.custom_id] for result in kept]
            self.answered = frozenset(result.custom_id for result in kept)
            if len(self.answered) < len(kept):
                raise ConfigError(f"{path} has two results of one custom_id: results go to another file")
            if kept != results:
                self._replace(kept)
        except BaseException:
            self._file.close()
            raise

    def add(self, answer: BatchAnswer) -> None:
        with writing(self._shown_path):
            self._file.write(f"{answer.line}\n")
            self._file.flush()
        self._order.append(self._places[answer.custom_id])

    def close(self) -> None:
        """Idempotent. Puts results in their places."""
        if self._is_regular and not self._file.closed and self._order != sorted(self._order):
            whole = [result for result in self._read() if result.custom_id]
            self._replace(sorted(whole, key=lambda result: self._places[result.custom_id]))
        with writing(self._shown_path):  # what a full disk had no room for is tried once more
            self._file.close()

    def _read(self) -> list[_Result]:
        """What the file holds. A line that is cut counts as a result without an answer."""
        if not self._is_regular:
            return []
        *lines, cut = self._path.read_bytes().split(b"\n")
        results = [self._result(line, f"{self._shown_path}, line {number}") for number, line in enumerate(lines, 1)]
        return [*results, _Result(cut, "", is_answer=False)] if cut else results

    def _result(self, line: bytes, where: str) -> _Result:
        advice = "results go to another file, or to that of an interrupted run of the same requests"
        try:
            result = json.loads(line)
            custom_id, response = result["custom_id"], result["response"]
            is_answer = response is not None and response["status_code"] == 200
            is_known = custom_id in self._places
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(f"{where} is not a result: {advice}") from None
        if not is_known:
            raise ConfigError(f"{where}: no request has the custom_id {shown(custom_id)}: {advice}")
        return _Result(line, custom_id, is_answer)

    def _replace(self, results: Iterable[_Result]) -> None:
        """The file then holds these, whole at any moment, and takes more."""
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            with contextlib.ExitStack() as undo:
                file = undo.enter_context(_opened(part, "w"))
                _lock(file, self._shown_path)
                file.writelines(f"{result.line.decode()}\n" for result in results)
                file.flush()
                os.fsync(file.fileno())
                shutil.copymode(self._path, part)
                part.replace(self._path)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(f"cannot write {part}: {error.strerror}") from None
        self._file.close()
        self._file = file


def _opened(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Half a surrogate pair is written as JSON's escape of it."""
    return path.open(mode, encoding="utf-8", errors="backslashreplace")


def _lock(file: TextIO, path: Path) -> None:
    """Raises ConfigError when another process has it. A file system without locks has none."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run writes its results to {path}") from None
