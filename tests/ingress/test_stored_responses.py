"""Responses that are stored, by the official client: continued, read again, deleted, and gone."""

from __future__ import annotations

import openai
import pytest
import pytest_asyncio
from weather import CALL, WEATHER

from conductor.ingress.apis.stored_responses import ENTRY_BYTES, StoredResponse, StoredResponses
from mooncake.errors import NodeUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_front(module_front_of):
    async with module_front_of(stored_responses_mb=1, api_keys=("anna", "ben")) as front:
        yield front


def client_of(front, key: str = "anna") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(front):
    async with client_of(front) as client:
        yield client


def prompt_of(front) -> str:
    return bytes(front.script.asked[-1].tokens.tolist()).decode()


async def test_a_response_is_continued_with_all_that_came_before(front, client):
    first = await client.responses.create(model="bytes", input="Hi", instructions="Be brief.")
    assert first.store is True and first.previous_response_id is None
    stream = await client.responses.create(
        model="bytes", input=[{"role": "user", "content": "And?"}], previous_response_id=first.id, stream=True
    )
    second = [event async for event in stream][-1].response
    assert prompt_of(front) == "<user>Hi<assistant>Hello, wörld!<user>And?<assistant>", "without its instructions"
    assert second.previous_response_id == first.id
    asked = {"model": "bytes", "input": "So?", "previous_response_id": second.id}
    counted = await client.responses.input_tokens.count(**asked, instructions="Go.")
    third = await client.responses.create(
        model="bytes", input="So?", previous_response_id=second.id, instructions="Go."
    )
    before = "<system>Go.<user>Hi<assistant>Hello, wörld!<user>And?<assistant>Hello, wörld!<user>So?<assistant>"
    assert prompt_of(front) == before and counted.input_tokens == third.usage.input_tokens
    again = await client.responses.create(model="bytes", input="Or?", previous_response_id=first.id)
    assert prompt_of(front) == "<user>Hi<assistant>Hello, wörld!<user>Or?<assistant>", "a response is continued twice"
    assert len({first.id, second.id, third.id, again.id}) == 4


async def test_a_call_is_answered_by_its_result_alone(front, client):
    front.script.text = CALL
    first = await client.responses.create(model="bytes", input="How is Bern?", tools=[WEATHER])
    [call] = first.output
    front.script.text = "Sunny."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    await client.responses.create(model="bytes", input=[result], previous_response_id=first.id, tools=[WEATHER])
    prompt = prompt_of(front)
    places = [prompt.index(words) for words in ("How is Bern?", "get_weather", "20 degrees")]
    assert prompt.count("How is Bern?") == 1 and places[0] < places[2]


async def test_a_response_is_read_again_and_deleted(front, client):
    made = await client.responses.create(model="bytes", input="Hi", metadata={"who": "me"})
    assert await client.responses.retrieve(made.id) == made
    await client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="is not stored here: it may be gone, of another API key or of"):
            await ask(made.id)
    refused = await front.http.get(
        f"/v1/responses/{made.id}", params={"stream": "true"}, headers={"authorization": "Bearer anna"}
    )
    assert refused.status_code == 400 and "not streamed again" in refused.json()["error"]["message"]
    for call in (client.responses.cancel(made.id), client.responses.input_items.list(made.id)):
        with pytest.raises(openai.NotFoundError, match="is not offered here: a stored response is read"):
            await call


async def test_what_is_gone_or_another_s_cannot_be_continued(front, client):
    made = await client.responses.create(model="bytes", input="Hi")
    async with client_of(front, "ben") as other:
        with pytest.raises(openai.BadRequestError, match="send the conversation so far as input") as error:
            await other.responses.create(model="bytes", input="And?", previous_response_id=made.id)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(made.id)
    unstored = await client.responses.create(model="bytes", input="Hi", store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError, match="conversations are not stored here"):
        await client.responses.create(model="bytes", input="And?", conversation="conv_1")


async def test_one_that_did_not_end_is_not_stored(front, client):
    front.script.error, front.script.error_after = NodeUnavailable("gone"), 3
    events = [event async for event in await client.responses.create(model="bytes", input="Hi", stream=True)]
    assert events[-1].type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[-1].response.id)


async def test_the_oldest_go_where_the_limit_is_reached(front, client):
    long = "x" * 300_000
    front.script.text = "ok"
    ids = [
        (await client.responses.create(model="bytes", input=long, truncation="auto")).id for _ in range(3)
    ]  # a megabyte holds three
    await client.responses.retrieve(ids[0])
    ids.append((await client.responses.create(model="bytes", input=long, truncation="auto")).id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(ids[1])  # used least recently
    for kept in (ids[0], ids[2], ids[3]):
        await client.responses.retrieve(kept)


async def test_bytes_are_counted():
    store = StoredResponses(4 * ENTRY_BYTES)
    for name in "abc":
        store.put(b"anna", name, StoredResponse(b"1", b"2"))
    store.put(b"anna", "a", StoredResponse(b"123", b""))
    store.put(b"anna", "large", StoredResponse(bytes(4 * ENTRY_BYTES), b""))
    assert store.get(b"anna", "large") is None, "larger than the limit"
    assert store.num_bytes == 3 * ENTRY_BYTES + 3 + 2 + 2
    assert not store.remove(b"ben", "a") and store.remove(b"anna", "a") and not store.remove(b"anna", "a")
    assert store.num_bytes == 2 * ENTRY_BYTES + 4
    assert not StoredResponses(0)
