"""/openapi.json describes the requests that this server decodes, and every path that it has."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described(module_front):
    return (await module_front.http.get("/openapi.json")).json()


def fields_of(described, operation):
    """The schemas of its body's fields, by name."""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]


def takes_objects(schema):
    return any(kind in json.dumps(schema) for kind in ('"object"', "$ref", "any value"))


async def test_the_fields_of_each_path_are_those_that_it_decodes(module_front, described):
    asked = 0
    for path, operations in described["paths"].items():
        if "requestBody" not in operations.get("post", {}):
            continue
        for name, schema in fields_of(described, operations["post"]).items():
            if takes_objects(schema):
                continue
            answer = await module_front.http.post(path, json={name: {}})
            assert answer.json()["error"]["message"].startswith(f"{name}: Expected"), f"{name} of {path}"
            asked += 1
    assert asked > 200


async def test_what_the_fields_refer_to_is_there(described):
    schemas = described["components"]["schemas"]
    named = {part.partition('"')[0] for part in json.dumps(described).split("#/components/schemas/")[1:]}
    assert named <= schemas.keys() and {"ChatRequest", "Message", "ResponsesRequest", "Turn"} <= schemas.keys()


async def test_every_path_is_there_and_those_with_parameters_name_them(module_front, described):
    paths = described["paths"]
    for path, operations in paths.items():
        assert not [method for method in operations if method not in ("get", "post", "delete")]
        if "get" in operations and "{" not in path:
            assert (await module_front.http.get(path)).status_code in (200, 503), path
    model = paths["/v1/models/{model}"]["get"]
    assert [(parameter["name"], parameter["in"]) for parameter in model["parameters"]] == [("model", "path")]
    assert set(paths) >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
