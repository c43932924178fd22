"""``mooncake demo``: disaggregated serving in under a minute. A cluster on this machine answers, a second turn reuses
the blocks of the first, and a small trace is replayed, all with their figures.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from rich.markup import escape

from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.role_main import unless_stopped
from mooncake.app.console import duration, err, gigabytes, out, plain_table, tokens_per_s
from mooncake.app.load.report import metered
from mooncake.app.talk import Conversation, TalkOptions
from mooncake.app.traces.replay import Replay, ReplayOptions
from mooncake.app.traces.replay_command import print_report
from mooncake.client import Client, GenerateChunk
from mooncake.config import Config
from mooncake.sampling_params import SamplingParams
from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest, scale

SYSTEM = (
    "You are a friendly science teacher. You explain one idea at a time, in plain words that a curious child of ten "
    "understands, with an example from everyday life, and you never use more than three short sentences. When a "
    "question builds on an earlier answer, you connect the two, and you say so when you are not sure."
)
QUESTIONS = ("Why is the sky blue?", "And why is it red when the sun goes down?")
ANSWER_TOKENS = 72
REPLAY_OUTPUT_TOKENS = 8


async def demo(config: Config) -> None:
    """Raises MooncakeError, including Cancelled."""
    cluster = LocalCluster(config, tell=_tell, tell_log=lambda line: err.print(line, markup=False, soft_wrap=True))
    await unless_stopped(_show(cluster), at_once=cluster.kill)


async def _show(cluster: LocalCluster) -> None:
    start_s = time.monotonic()
    nodes = ", ".join(cluster.children)
    out.rule("[bold]1  a cluster on this machine", align="left", style="dim")
    out.print(f"one process each: {nodes}; model {escape(cluster.config.model.path)}")
    async with cluster:
        out.print(f"ready after {time.monotonic() - start_s:.1f} s; OpenAI at {cluster.http_url}/v1\n", soft_wrap=True)
        turns = await asyncio.to_thread(_converse, cluster.grpc_address)
        _show_turns(turns, cluster.config.block.tokens)
        await _replay(cluster)
        out.print()
    out.print(f"everything stopped after {time.monotonic() - start_s:.0f} s. Next:\n")
    _tell_next()


def _tell_next() -> None:
    folder = min(os.path.relpath(Path(sys.prefix, "bin")), f"{sys.prefix}/bin", key=len)
    for command, what in (
        ("mooncake serve", "a cluster that stays"),
        ("mooncake chat", "talk to it, in another terminal"),
        ("mooncake replay TRACE", "play a recorded trace against it"),
    ):
        out.print(f"  {folder}/{command:<24} [dim]{what}[/]", soft_wrap=True)


def _converse(address: str) -> list[GenerateChunk]:
    """Ask the questions as two turns of one conversation, printing tokens as they come. Returns each turn's last
    chunk."""
    options = TalkOptions(address, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0))
    ends: list[GenerateChunk] = []
    with Client(address) as client:
        conversation = Conversation(client, options, [{"role": "system", "content": SYSTEM}])
        titles = ("a question", "a second turn: its prompt begins with the first, whose blocks are cached")
        for number, (question, title) in enumerate(zip(QUESTIONS, titles, strict=True), start=2):
            out.rule(f"[bold]{number}  {title}", align="left", style="dim")
            out.print(f"[bold cyan]› {question}[/]")
            for chunk in conversation.turn(question):
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                if chunk.finish_reason:
                    ends.append(chunk)
            sys.stdout.write(" … (cut for the demo)\n\n" if chunk.finish_reason == "length" else "\n\n")
    return ends


def _show_turns(turns: list[GenerateChunk], block_tokens: int) -> None:
    rows: dict[str, list[str]] = {}
    for turn in turns:
        assert turn.usage is not None
        assert turn.timings is not None
        usage, timings, report = turn.usage, turn.timings, turn.timings.prefill
        for name, value in (
            ("prompt", f"{usage.prompt_tokens} tokens"),
            ("reused", f"{usage.cached_tokens // block_tokens} blocks = {usage.cached_tokens} tokens"),
            ("TTFT", duration(timings.ttft_ms)),
            ("TBT, mean of all gaps", duration(timings.mean_tbt_ms)),
            ("TBT, mean of the longest tenth", duration(timings.tail_tbt_ms)),
            ("decoding", f"{tokens_per_s(timings):.1f} tokens/s"),
            ("KV handed to decode", f"{gigabytes(report.sent_bytes)} over {report.transport or 'nothing'}"),
            ("KV stored in the pool", gigabytes(report.pool_bytes)),
            ("prefill on", timings.prefill_node),
            ("decode on", timings.decode_node),
        ):
            rows.setdefault(name, []).append(value)
    table = plain_table("", "first turn", "second turn")
    for name, values in rows.items():
        table.add_row(name, *map(escape, values))
    out.print(table)
    out.print()


async def _replay(cluster: LocalCluster) -> None:
    trace = [scale(request, cluster.config.block.tokens, REPLAY_OUTPUT_TOKENS) for request in small_trace()]
    out.rule("[bold]4  a replay: conversations of several people at once", align="left", style="dim")
    options = ReplayOptions(tokens_per_block=cluster.config.block.tokens, timeout_s=60.0)
    with metered("replaying", len(trace)) as add:
        report = await Replay(cluster.grpc_address, options, add).run(trace)
    print_report(report)


def small_trace(people: int = 4, turns: int = 3) -> list[TraceRequest]:
    """Conversations that share a first block (a system prompt) and grow by one and a half blocks per turn."""
    requests: list[TraceRequest] = []
    for turn in range(turns):
        for person in range(people):
            blocks = 2 + 3 * turn // 2
            own = tuple(1000 * (person + 1) + block for block in range(blocks - 1))
            tail = 1000 * (person + 1) + 500 + turn  # the partial last block of a turn is not shared
            tokens = blocks * TRACE_BLOCK_TOKENS + TRACE_BLOCK_TOKENS // 2
            requests.append(TraceRequest(1500.0 * turn + 250.0 * person, tokens, 64, (0, *own, tail)))
    return requests


def _tell(sentence: str) -> None:
    out.print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)
