"""When what the engine says of a request becomes a message."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode_node.outputs import MAX_GAP_S, Outputs, least_gap_s
from mooncake.engine.contract import StepOutput
from mooncake.errors import MooncakeError, NodeUnavailable
from mooncake.types import FinishReason, SampledToken

LONG_S = 600.0  # nobody waits for it


def output(index: int, reason: FinishReason | None = None) -> StepOutput:
    return StepOutput("r", SampledToken(index, 7), reason)


async def test_the_first_output_waits_for_nothing_and_the_next_ones_come_together() -> None:
    outputs, said = Outputs(), [output(index) for index in range(3)]
    outputs.put(said[0])
    assert await outputs.take(LONG_S) == said[:1]

    taking = asyncio.create_task(outputs.take(0.2))
    outputs.put(said[1])
    await asyncio.sleep(0)
    outputs.put(said[2])
    assert await taking == said[1:]


@pytest.mark.parametrize("last", [output(2, FinishReason.LENGTH), NodeUnavailable("the engine has failed")])
async def test_an_end_waits_for_nothing(last: StepOutput | MooncakeError) -> None:
    outputs = Outputs()
    outputs.put(output(0))
    await outputs.take(LONG_S)

    outputs.put(output(1))
    taking = asyncio.create_task(outputs.take(LONG_S))
    threading.Thread(target=outputs.put, args=(last,)).start()
    assert await taking == [output(1), last]

    outputs.put(output(3))  # another answer goes on: the end was of the message before
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await outputs.take(LONG_S)
    outputs.put(output(4, FinishReason.STOP))
    assert await outputs.take(LONG_S) == [output(3), output(4, FinishReason.STOP)], "nothing was lost with the timeout"


async def test_without_a_gap_each_step_is_a_message() -> None:
    outputs = Outputs()
    for index in range(3):
        outputs.put(output(index))
        assert await outputs.take(0.0) == [output(index)]


def test_messages_become_rarer_with_the_requests_up_to_a_limit() -> None:
    assert least_gap_s(1) < least_gap_s(2) < least_gap_s(64) < MAX_GAP_S == least_gap_s(10_000)
