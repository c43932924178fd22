"""Every mistake in a request is a typed error that names the field, before anything is sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncake
from mooncake import sampling_params
from mooncake.client import Client
from mooncake.errors import InvalidRequest, NodeUnavailable
from mooncake.repetition import Repetitions
from mooncake.sampling import BeamSearch, Guide, GuideKind, RepetitionDetection, SamplingParams, ThinkingBudget


@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"beam_search": True}, "beam_search", "must be a BeamSearch, got True"),
        ({"n": 2, "beam_search": BeamSearch(length_penalty="x")}, "length_penalty", "must be a number, got 'x'"),
        ({"guide": "[0-9]+"}, "guide", "must be a Guide, got '[0-9]+'"),
        ({"guide": Guide(GuideKind.REGEX, 5)}, "guide", "must be a Guide with a text, got 5"),
        ({"temperature": "x"}, "temperature", "must be a number, got 'x'"),
        ({"temperature": math.nan}, "temperature", "must be between 0 and 100, got nan"),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number, got 1.5"),
        ({"max_tokens": 0}, "max_tokens", "must be between 1 and 1048576, got 0"),
        ({"n": None}, "n", "must be a whole number, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids", "must be a list of token ids, got 5"),
        ({"allowed_token_ids": 5}, "allowed_token_ids", "must be a list of token ids, got 5"),
        ({"bad_words": ("word",)}, "bad_words", "must be a tuple of tuples of token ids, got 'word'"),
        ({"logit_bias": {5: 1.0}}, "logit_bias", "must be pairs of a token id and its bias"),
        ({"logit_bias": ((5, "x"),)}, "logit_bias", "must be a number, got 'x'"),
        ({"logit_bias": (("5", 1.0),)}, "logit_bias", "has token ids, whole numbers, got '5'"),
        ({"logit_bias": ((5.5, 1.0),)}, "logit_bias", "has token ids, whole numbers, got 5.5"),
        ({"repetition_detection": 3}, "repetition_detection", "must be a RepetitionDetection, got 3"),
        (
            {"repetition_detection": RepetitionDetection(4, 1)},
            "repetition_detection.min_count",
            "must be between 2 and 1024, got 1",
        ),
        (
            {"repetition_detection": RepetitionDetection(4, 2, 5)},
            "repetition_detection.min_pattern_size",
            "must be between 1 and 4, got 5",
        ),
        (
            {"repetition_detection": RepetitionDetection(1024, 1024)},
            "repetition_detection",
            "looks at 16384 tokens at most (max_pattern_size times min_count), got 1048576",
        ),
        ({"thinking_budget": 3}, "thinking_budget", "must be a ThinkingBudget, got 3"),
        ({"thinking_budget": ThinkingBudget(-1, 0)}, "thinking_budget", "must be between 0 and 1048576, got -1"),
    ],
)
def test_a_wrong_value_is_told_by_its_field(wishes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**wishes)
    assert (refused.value.param, refused.value.message) == (param, f"{param} {words}")


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"logit_bias": {"x": 1.0, 6: 2}}, "logit_bias"),
        ({"logit_bias": {5: "x"}}, "logit_bias"),
        ({"logit_bias": {5.5: 1.0}}, "logit_bias"),
        ({"logit_bias": [("5", 1.0)]}, "logit_bias"),
        ({"best_of": "x"}, "best_of"),
        ({"allowed_token_ids": np.array([], int)}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, "x"]}, "allowed_token_ids"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids"),
        ({"stop_token_ids": [[5]]}, "stop_token_ids"),
        ({"detokenize": "no"}, "detokenize"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"include_stop_str_in_output": "x"}, "include_stop_str_in_output"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"output_kind": "delta"}, "output_kind"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_a_wrong_value_of_the_form_is_told_by_its_field(wishes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling_params.SamplingParams(**wishes)
    assert refused.value.param == param


def test_more_logprobs_than_a_cluster_tells_are_for_one_process() -> None:
    for name, wanted, told in (("logprobs", 21, "21 asks for more"), ("prompt_logprobs", -1, "-1 asks for the whole")):
        form = sampling_params.SamplingParams(**{name: wanted})
        sentence = f"{name} are at most 20 here, and {told}.*max_logprobs={wanted}"
        with pytest.raises(InvalidRequest, match=sentence) as error:
            form.for_engine()
        assert error.value.param == name
    assert sampling_params.SamplingParams(logprobs=-1).for_engine(max_logprobs=300, vocab_size=300).logprobs == 300
    assert sampling_params.SamplingParams(logprobs=500).for_engine(max_logprobs=300, vocab_size=300).logprobs == 300


def test_the_form_takes_what_json_and_numpy_make_of_token_ids() -> None:
    form = sampling_params.SamplingParams(
        logit_bias={"5": 1.0, 3: -1.0}, allowed_token_ids=np.array([7, 8]), best_of=None, n=2
    )
    assert form.for_engine().logit_bias == ((3, -1.0), (5, 1.0))
    assert form.for_engine().allowed_token_ids == (7, 8) and form.for_engine().num_answers == 2


def test_numbers_of_numpy_are_numbers() -> None:
    sampling = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5))
    assert sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"prompt": [1, 2, 3]}, "prompt must be a text (token ids are given as token_ids), got [1, 2, 3]"),
        (
            {"prompt": "x", "sampling": {"max_tokens": 4}},
            "sampling must be a mooncake.SamplingParams, got {'max_tokens': 4}",
        ),
        (
            {"prompt": "x", "sampling": SamplingParams()},
            "sampling must be a mooncake.SamplingParams, got SamplingParams(",
        ),
        (
            {"prompt": "x", "sampling": sampling_params.SamplingParams(skip_special_tokens=False)},
            "skip_special_tokens is always true over gRPC",
        ),
        (
            {"prompt": "x", "sampling": sampling_params.SamplingParams(detokenize=False)},
            "detokenize is always true over gRPC",
        ),
        ({"messages": ["Hello"]}, "messages look like"),
        ({"messages": [{"role": "user"}]}, "messages look like"),
        ({"token_ids": [-1]}, "a value of the request cannot be sent"),
        ({"token_ids": ["x"]}, "a value of the request cannot be sent"),
        ({"prompt": "x", "priority": 1 << 40}, "a value of the request cannot be sent"),
        ({"prompt": "x", "timeout_s": "soon"}, "a value of the request cannot be sent"),
        ({"prompt": "x", "session": "é"}, "a session has printable ASCII characters alone"),
        ({"prompt": "x", "session": "a\n"}, "a session has printable ASCII characters alone"),
        ({"prompt": "x", "session": 5}, "session must be a str, got 5"),
    ],
)
def test_a_client_refuses_what_cannot_be_sent(wishes: dict[str, Any], words: str) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest) as refused:
        client.generate(**wishes)
    assert refused.value.message.startswith(words)


def test_a_client_that_is_closed_says_so() -> None:
    client = Client("127.0.0.1:9")
    client.close()
    for call in (lambda: client.generate("x"), client.models, client.status, lambda: client.unload_adapter("a")):
        with pytest.raises(InvalidRequest, match="this client is closed"):
            call()


def test_other_calls_of_a_client_refuse_what_cannot_be_sent_too_and_take_paths() -> None:
    with Client("127.0.0.1:9") as client:
        for call in (lambda: client.set_role(5, "decode"), lambda: client.load_adapter("a", cast(str, 5))):  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="a value of the request cannot be sent"):
                call()
        with pytest.raises(NodeUnavailable):
            client.load_adapter("a", Path("/folder"))


@pytest.mark.parametrize("key", ["sk-1\n", "sk é", "x" * 513])
def test_a_key_that_cannot_be_sent_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(InvalidRequest, match="an API key is 1 to 512 characters of visible ASCII") as refused:
        Client("127.0.0.1:9", api_key=key)
    assert key.strip() not in refused.value.message


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:50051", "127.0.0.1", "127.0.0.1:", ":50051", "http://here", cast(str, None)]
)
def test_a_client_wants_host_and_port(address: str) -> None:
    with pytest.raises(InvalidRequest, match="an address is HOST:PORT"):
        Client(address)
    Client("[::1]:50051").close()


def test_what_a_request_is_made_of_is_found_in_the_package_itself() -> None:
    assert (mooncake.SamplingParams, mooncake.BeamSearch) == (sampling_params.SamplingParams, BeamSearch)
    assert (mooncake.Guide, mooncake.GuideKind) == (Guide, GuideKind)


@given(
    tokens=st.lists(st.integers(0, 2), max_size=14),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    count=st.integers(2, 4),
)
def test_an_answer_ends_where_its_last_tokens_are_one_pattern_again_and_again(
    tokens: list[int], sizes: list[int], count: int
) -> None:
    least, most = sizes
    repeats = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(least, most + 1)
    )
    wanted = RepetitionDetection(most, count, least)
    answer = np.array(tokens, np.uint32)
    assert Repetitions(wanted, answer).are_enough == repeats
    for start in range(len(tokens)):  # it follows the answer from anywhere
        followed = Repetitions(wanted, answer[:start])
        for end in range(start + 1, len(tokens) + 1):
            followed.add_last(answer[:end])
        assert followed.are_enough == repeats
