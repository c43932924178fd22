"""``mooncake generate`` and ``mooncake chat``: a person asks a running cluster and sees what each answer cost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass, field

import grpc
from google.protobuf.json_format import MessageToDict
from rich.markup import escape

from mooncake.app.calls import Answer, Turn, ask, chat_request
from mooncake.app.console import answer_line, err, print_json
from mooncake.errors import MooncakeError
from mooncake.rpc import common_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class TalkOptions:
    address: str
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system: str = ""
    as_json: bool = False
    timeout_s: float = 600.0

    @property
    def sampling(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )


def generate(prompt: str, options: TalkOptions, raw: bool) -> None:
    """One answer. ``raw`` continues the prompt as it is, without the chat template."""
    if raw:
        request = inference_pb2.GenerateRequest(text=prompt, sampling=options.sampling)
    else:
        request = chat_request([*_system_turn(options), Turn("user", prompt)], options.sampling)
    request.stop.extend(options.stop)
    answer = asyncio.run(_one_call(request, options))
    if options.as_json:
        print_json(
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": MessageToDict(answer.usage, preserving_proto_field_name=True),
                "timings": MessageToDict(answer.timings, preserving_proto_field_name=True),
            }
        )
    else:
        sys.stdout.write("\n")
        _tell(answer)


async def _one_call(request: inference_pb2.GenerateRequest, options: TalkOptions) -> Answer:
    async with grpc.aio.insecure_channel(options.address) as channel:
        return await ask(channel, request, _ignore if options.as_json else _write, options.timeout_s)


def chat(options: TalkOptions) -> None:
    """A conversation until end of input. Each turn sends the whole conversation, whose blocks are in the cache."""
    conversation = Conversation(options, _system_turn(options))
    err.print("[dim]Ctrl-C stops an answer, Ctrl-D ends the conversation, /new forgets it[/]")
    with asyncio.Runner() as runner:
        channel = runner.run(_open(options.address))
        try:
            while (text := _read_line()) is not None:
                if text == "/new":
                    conversation = Conversation(options, _system_turn(options))
                elif text:
                    conversation.take_turn(runner, channel, text)
        finally:
            runner.run(channel.close(None))


@dataclass(slots=True)
class Conversation:
    options: TalkOptions
    turns: list[Turn] = field(default_factory=list)

    def take_turn(self, runner: asyncio.Runner, channel: grpc.aio.Channel, text: str) -> None:
        """Ask, and remember both sides. A turn that fails or is stopped is forgotten: the next one starts before it."""
        request = chat_request([*self.turns, Turn("user", text)], self.options.sampling)
        request.stop.extend(self.options.stop)
        try:
            answer = runner.run(ask(channel, request, _write, self.options.timeout_s))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            err.print("[dim]stopped; this turn is forgotten[/]")
            return
        except MooncakeError as error:
            err.print(f"[red]{escape(error.message)}[/]")
            return
        sys.stdout.write("\n")
        _tell(answer)
        self.turns += [Turn("user", text), Turn("assistant", answer.text)]


async def _open(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def _read_line() -> str | None:
    """What the person typed; None at the end of input, or when Ctrl-C is pressed at the prompt."""
    prompt = "› " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        return input(prompt).strip()
    sys.stdout.write("\n")
    return None


def _system_turn(options: TalkOptions) -> list[Turn]:
    return [Turn("system", options.system)] if options.system else []


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    return


def _tell(answer: Answer) -> None:
    cut = " · cut at max tokens" if answer.finish_reason == "length" else ""
    err.print(f"[dim]{escape(answer_line(answer.usage, answer.timings))}{cut}[/]")
