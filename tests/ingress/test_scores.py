"""Scores of pairs of texts and rankings of documents: forms of requests and answers, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ingress.conftest import states_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
EOS = 256


def cosine(first, second):
    """Of what the core has given for two texts."""
    a, b = (states_of(np.array([*text.encode(), EOS], np.uint32)) for text in (first, second))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


async def ask(front, path, **body):
    answer = await front.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
async def test_one_text_with_each_of_others(front, path, names):
    answer = await ask(front, path, model="bytes", **{names[0]: "one", names[1]: ["two", "three", "one"]})
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "bytes", "score-")
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(3)]
    expected = [cosine("one", other) for other in ("two", "three", "one")]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-6)
    assert expected[2] == pytest.approx(1) and expected[0] < 0.999
    assert answer["usage"]["prompt_tokens"] == 4 + 4 + 6 + 4
    assert len(front.script.asked) == 4, "the one text is embedded once"


async def test_pairs(front):
    answer = await ask(front, "/score", text_1=["a", "b"], text_2=["c", "d"])
    scores = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(scores, [cosine("a", "c"), cosine("b", "d")], atol=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_nearest_first(front, path):
    front.script.cached_tokens = 2
    texts = ["far", "query", "another"]
    answer = await ask(front, path, model="bytes", query="query", documents=[texts[0], {"text": texts[1]}, texts[2]])
    results = answer["results"]
    scores = [cosine("query", text) for text in texts]
    assert [each["index"] for each in results] == sorted(range(3), key=lambda number: -scores[number])
    assert (results[0]["index"], results[0]["document"]) == (1, {"text": "query"})
    for each in results:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-6)
        assert each["document"]["text"] == texts[each["index"]]
    assert (answer["model"], answer["id"][:7]) == ("bytes", "rerank-")
    assert answer["usage"]["total_tokens"] == 6 + 4 + 6 + 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * 2


async def test_the_nearest_without_their_texts(front):
    body = {"query": "q", "documents": ["a", "q", "b"]}
    [nearest] = (await ask(front, "/rerank", **body, top_n=1, return_documents=False))["results"]
    assert set(nearest) == {"index", "relevance_score"} and nearest["index"] == 1
    assert len((await ask(front, "/rerank", **body, top_n=0))["results"]) == 3
    assert len((await ask(front, "/rerank", **body, top_n=9))["results"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {}, "text_1", "compared as one of"),
        ("/score", {"text_1": "a"}, "text_1", "compared as one of"),
        ("/score", {"text_1": "a", "items": "b"}, "items", "compared as one of"),
        ("/score", {"text_1": "a", "text_2": "b", "items": "c"}, "items", "compared as one of"),
        ("/score", {"text_1": [], "text_2": "b"}, "text_1", "no text"),
        ("/score", {"queries": "a", "documents": []}, "documents", "no text"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 texts cannot be paired with 1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "empty"),
        ("/score", {"text_1": "", "text_2": "b"}, "text_1", "empty"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2048}, "text_2[2047]", "at most 2048 texts"),
        ("/score", {"text_1": "a", "text_2": "b", "cache_salt": ""}, "cache_salt", "separates nothing"),
        ("/rerank", {"query": "q", "documents": []}, "documents", "no documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n", "number of documents"),
        ("/rerank", {"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]", "empty"),
        ("/rerank", {"query": "a" * 4096, "documents": ["a"]}, "query", "4097 tokens > 4096"),
        ("/rerank", {"query": "q", "documents": [{"image": "x"}]}, "documents[0]", "text"),
        ("/rerank", {"documents": ["a"]}, "query", "query"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_field(front, path, body, param, words):
    refused = await front.http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param) and words in error["message"]
    assert not front.script.asked


async def test_unknown_models_and_fields(front):
    body = {"query": "q", "documents": ["a"]}
    refused = await front.http.post("/rerank", json=body | {"model": "other"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    warned = await front.http.post("/rerank", json=body | {"top_k": 3})
    assert "top_k" in warned.headers["x-mooncake-warning"]
