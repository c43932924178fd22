"""``mooncake generate`` and ``mooncake chat``: ask a running cluster; each answer is followed by its figures."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.markup import escape

from mooncake.app.console import answer_line, err, print_json
from mooncake.app.reach import reach
from mooncake.client import Client, GenerateChunk
from mooncake.errors import ContextTooLong, MooncakeError
from mooncake.sampling_params import SamplingParams

COMMANDS = "/new (or /clear) forgets the conversation, /quit (or /exit, Ctrl-D) ends it, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class TalkOptions:
    address: str
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    system: str = ""
    timeout_s: float | None = None  # None: the cluster's limit
    model: str = ""  # name of an adapter

    def ask(
        self, client: Client, prompt: str | None = None, messages: Sequence[Mapping[str, str]] | None = None
    ) -> Iterator[GenerateChunk]:
        """An answer of up to ``sampling.max_tokens``, or fewer if the context has no room for more."""
        try:
            yield from self._ask(client, prompt, messages, self.sampling)
        except ContextTooLong as error:
            if error.param != "max_tokens":
                raise
            num_prompt = len(client.tokenize(prompt, messages=messages, model=self.model))
            room = max(1, client.models()[0].max_model_len - num_prompt)
            yield from self._ask(client, prompt, messages, replace(self.sampling, max_tokens=room))

    def _ask(
        self,
        client: Client,
        prompt: str | None,
        messages: Sequence[Mapping[str, str]] | None,
        sampling: SamplingParams,
    ) -> Iterator[GenerateChunk]:
        return client.stream(
            prompt,
            messages=messages,
            sampling=sampling,
            stop=self.stop,
            model=self.model,
            timeout_s=self.timeout_s,
        )


def generate(prompt: str, options: TalkOptions, raw: bool, as_json: bool) -> None:
    """Print one answer. ``raw`` continues the prompt directly, without the chat template."""
    with reach(options.address) as client:
        if raw:
            chunks = options.ask(client, prompt)
        else:
            chunks = options.ask(client, messages=[*_system_turn(options), {"role": "user", "content": prompt}])
        answer = Answer()
        try:
            for chunk in chunks:
                answer.add(chunk)
                if not as_json:
                    _write(chunk.text)
        except (MooncakeError, KeyboardInterrupt):
            if answer.text and not as_json:
                _write("\n")  # later output begins on a new line
            raise
    if as_json:
        last = answer.last
        print_json(
            {
                "request_id": last.request_id,
                "text": answer.text,
                "finish_reason": last.finish_reason,
                "usage": last.usage,
                "timings": last.timings,
            }
        )
    else:
        _write("\n")
        _tell(answer.last)


@dataclass(slots=True)
class Answer:
    """One answer so far."""

    text: str = ""
    last: GenerateChunk = field(default_factory=lambda: GenerateChunk("", (), ""))

    def add(self, chunk: GenerateChunk) -> None:
        self.text += chunk.text
        self.last = chunk


@dataclass(slots=True)
class Conversation:
    """Each turn sends the whole conversation; the cluster has the blocks of earlier turns in its cache."""

    client: Client
    options: TalkOptions
    messages: list[dict[str, str]] = field(default_factory=list)

    def turn(self, text: str) -> Iterator[GenerateChunk]:
        """Stream the answer. A turn that fails or is interrupted is dropped from the conversation."""
        question = {"role": "user", "content": text}
        answer = Answer()
        for chunk in self.options.ask(self.client, messages=[*self.messages, question]):
            answer.add(chunk)
            yield chunk
        self.messages += [question, {"role": "assistant", "content": answer.text}]


def chat(options: TalkOptions) -> None:
    """Hold a conversation until end of input, or the command that ends it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives ``input`` arrow keys and earlier lines
    with reach(options.address) as client:
        client.tokenize("x", model=options.model)  # so that errors come before the first question
        conversation = Conversation(client, options, _system_turn(options))
        err.print(f"[dim]{COMMANDS}[/]")
        while (text := _read_line()) is not None:
            if text in ("/quit", "/exit"):
                break
            if text in ("/new", "/clear"):
                conversation = Conversation(client, options, _system_turn(options))
                err.print("[dim]a new conversation[/]")
            elif re.match(r"/([a-z]+|\?)(\s|$)", text):  # a path has more slashes
                err.print(f"[dim]{COMMANDS}[/]")
            elif text:
                _take_turn(conversation, text)


def _take_turn(conversation: Conversation, text: str) -> None:
    try:
        for chunk in conversation.turn(text):
            _write(chunk.text)
            if chunk.finish_reason:
                _write("\n")
                _tell(chunk)
    except KeyboardInterrupt:
        _write("\n")
        err.print("[dim]stopped; this turn is forgotten[/]")
    except MooncakeError as error:
        _write("\n")
        err.print(f"[red]{escape(error.message)}[/]")


def _read_line() -> str | None:
    """A line of input; None at the end of input or after Ctrl-C at the prompt."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        return input("› " if sys.stdin.isatty() else "").strip()
    _write("\n")
    return None


def _system_turn(options: TalkOptions) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(last: GenerateChunk) -> None:
    if last.usage is not None and last.timings is not None:
        cut = " · cut at --max-tokens" if last.finish_reason == "length" else ""
        err.print(f"[dim]{escape(answer_line(last.usage, last.timings))}{cut}[/]", soft_wrap=True)
