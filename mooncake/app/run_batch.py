"""``mooncake run-batch``: a file of requests in OpenAI's batch format, answered by a running server into another file.

Any server of OpenAI's HTTP API does. The file is read as a whole before anything is sent; a request in it that cannot
be sent has its result, like one that the server refuses.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

from mooncake.api_keys import bearer, own_api_key
from mooncake.app.batch_results import BatchAnswer, BatchResults
from mooncake.app.console import counted, err
from mooncake.errors import ConfigError, NodeUnavailable
from mooncake.json_file import filled_lines
from mooncake.tls import CA_CERTS_ENV, own_tls

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
TRIES = 8
MAX_WAIT_S = 30.0
ANSWER_S = 3600.0  # the server has a limit of its own
_TRY_LATER = (429, 502, 503, 504)

Response = HTTPResponse | urllib.error.HTTPError


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    path: str
    body: bytes
    fault: str = ""  # why it cannot be sent


def run_batch(requests_file: Path, results_file: Path, url: str, concurrency: int) -> bool:
    """Write a result for each request, in their order. Those that ``results_file`` has the answers of are not sent, so
    an interrupted run goes on. Returns whether all were answered. Raises ConfigError for files that cannot be sent or
    would be lost, NodeUnavailable when no server listens at ``url``."""
    requests = read_requests(requests_file)
    if results_file.exists() and results_file.samefile(requests_file):
        raise ConfigError(f"{results_file} holds the requests: results go to another file")
    server = BatchServer(url)
    server.check()
    with contextlib.closing(BatchResults(results_file, [request.custom_id for request in requests])) as results:
        missing = [request for request in requests if request.custom_id not in results.answered]
        if results.answered:
            has = f"{results_file} has {len(results.answered)} of {len(requests)} answers already"
            err.print(f"{has}; {f'sending the other {len(missing)}' if missing else 'remove it to ask again'}")
        return _answer_all(server, missing, results, concurrency)


def _answer_all(server: BatchServer, requests: Sequence[BatchRequest], results: BatchResults, concurrency: int) -> bool:
    failed: dict[str, BatchAnswer] = {}
    begun_s = time.monotonic()
    with counted("answering", len(requests)) as advance:
        for answer in _answers(server, requests, concurrency):
            if answer.status != 200:
                failed[answer.custom_id] = answer
            results.add(answer)
            advance()
    took_s = time.monotonic() - begun_s
    if requests:
        err.print(f"{len(requests) - len(failed)} of {len(requests)} requests were answered in {took_s:.1f} s")
    if first := next((failed[each.custom_id] for each in requests if each.custom_id in failed), None):
        err.print(f"not answered, for one: {first.custom_id}: {first.reason}", markup=False, soft_wrap=True)
    return not failed


def _answers(server: BatchServer, requests: Sequence[BatchRequest], concurrency: int) -> Iterator[BatchAnswer]:
    """As they come: one that takes long keeps none that are there from being written. The threads are daemons, so an
    interrupt does not wait for answers."""
    futures: list[Future[BatchAnswer]] = [Future() for _ in requests]
    waiting: SimpleQueue[tuple[BatchRequest, Future[BatchAnswer]]] = SimpleQueue()
    for both in zip(requests, futures, strict=True):
        waiting.put(both)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                request, future = waiting.get_nowait()
                try:
                    future.set_result(_faulty(request) if request.fault else server.send(request))
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(min(concurrency, len(requests))):
        threading.Thread(target=work, name="batch", daemon=True).start()
    for future in as_completed(futures):
        yield future.result()


def _faulty(request: BatchRequest) -> BatchAnswer:
    return BatchAnswer(request.custom_id, 0, "", request.fault, "invalid_request")


def read_requests(file: Path) -> list[BatchRequest]:
    """Raises ConfigError, naming the line, for what no result could be told of: no custom_id, or that of another."""
    requests: dict[str, BatchRequest] = {}
    for where, line in filled_lines(file):
        request = _request(line, where)
        if request.custom_id in requests:
            raise ConfigError(f"{where}: the custom_id {request.custom_id!r} is there twice")
        requests[request.custom_id] = request
    if not requests:
        raise ConfigError(f"{file} has no requests")
    return list(requests.values())


def _request(line: str, where: str) -> BatchRequest:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        raise ConfigError(f"{where}: a request has a custom_id")
    path, body = given.get("url"), given.get("body")
    if fault := _fault(given.get("method", "POST"), path, body):
        return BatchRequest(given["custom_id"], "", b"", f"{where}: {fault}")
    return BatchRequest(given["custom_id"], str(path), json.dumps(body).encode())


def _fault(method: object, path: object, body: object) -> str:
    if method != "POST" or path not in PATHS:
        return f"a request is a POST to one of {', '.join(PATHS)}"
    if not isinstance(body, dict):
        return "a request has a body, an object"
    return "a result is one object, so it is not streamed" if body.get("stream") else ""


class BatchServer:
    """One server. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for what is not the address of an HTTP server, and for unusable files of ``own_tls``."""
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"a server's address is http://HOST:PORT, got {url!r}")
        tls = own_tls()
        secure = urllib.request.HTTPSHandler(context=tls.context() if tls else None)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
        self._headers = {"content-type": "application/json", **dict(bearer(own_api_key()))}

    def check(self) -> None:
        """Raises NodeUnavailable when nobody listens."""
        try:
            self._opener.open(f"{self._url}/health", timeout=30).close()
        except urllib.error.HTTPError:
            pass  # it answers
        except (OSError, HTTPException) as error:
            if isinstance(reason := getattr(error, "reason", None), ssl.SSLError):
                what = f"there is no TLS with {self._url}: {reason}; {CA_CERTS_ENV} names the certificates to trust"
                raise NodeUnavailable(what) from None
            if isinstance(error, HTTPException):
                what = f"who answers at {self._url} does not speak HTTP; with TLS its address is https://HOST:PORT"
                raise NodeUnavailable(what) from None
            what = f"no server answers at {self._url}; start one with `mooncake serve`, or name another with --address"
            raise NodeUnavailable(what) from None

    def send(self, request: BatchRequest) -> BatchAnswer:
        """Waits as long as the server asks for when it is full."""
        for left in reversed(range(TRIES)):
            answer, wait_s = self._try(request)
            if not left or answer.status not in (0, *_TRY_LATER):
                break
            time.sleep(wait_s)
        return answer

    def _try(self, request: BatchRequest) -> tuple[BatchAnswer, float]:
        """The answer, and after which time to try again if it is an error."""
        post = urllib.request.Request(f"{self._url}{request.path}", request.body, self._headers)
        try:
            with self._open(post) as response:
                asked = response.headers.get("retry-after", "")
                wait_s = float(asked) if asked.isdecimal() else 1.0
                answer = _answer(request, response.status or 0, response.headers, response.read())
        except (OSError, HTTPException) as error:
            return BatchAnswer(request.custom_id, 0, "", str(error) or type(error).__name__), 1.0
        return answer, min(wait_s, MAX_WAIT_S)

    def _open(self, post: urllib.request.Request) -> Response:
        try:
            return cast(Response, self._opener.open(post, timeout=ANSWER_S))
        except urllib.error.HTTPError as error:
            return error  # a response like any other


def _answer(request: BatchRequest, status: int, headers: Message, body: bytes) -> BatchAnswer:
    try:
        said: object = json.loads(body)
    except ValueError:
        said = body.decode(errors="replace")
    return BatchAnswer(request.custom_id, status, headers.get("x-request-id", ""), said)
