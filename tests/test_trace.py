"""Prompts from a trace: equal ids are equal prefixes, at every scale, and cache hits can be counted."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import InvalidRequest
from mooncake.hashing import extend_chain
from mooncake.trace import TraceRequest, expected_hits, load_trace, scale, trace_tokens

TRACES = Path(__file__).parents[2] / "shared" / "traces"
VOCAB = 49152


def line(timestamp: float = 0, tokens: int = 600, ids: tuple[int, ...] = (0, 1), **changes: object) -> str:
    fields = {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": list(ids)}
    return json.dumps(fields | changes) + "\n"


def request(*ids: int, tokens: int, output: int = 1) -> TraceRequest:
    return TraceRequest(0, tokens, output, ids)


def test_plain_xz_and_gz_files_read_the_same(tmp_path: Path) -> None:
    text = line(0) + "\n" + line(3000, 512, (7,), note="of another tool")
    (tmp_path / "t.jsonl").write_text(text)
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "marked.jsonl").write_text(text, encoding="utf-8-sig")  # as some editors write it
    expected = [TraceRequest(0, 600, 5, (0, 1)), TraceRequest(3000, 512, 5, (7,))]
    for name in ("t.jsonl", "t.jsonl.xz", "t.jsonl.gz", "marked.jsonl"):
        assert load_trace(tmp_path / name) == expected
        assert load_trace(tmp_path / name, limit=1) == expected[:1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the trace holds no request"),
        ('{"x": ' + "[" * 100_000, ":1: maximum recursion depth"),
        (line() + "{oops\n", ":2: JSON is malformed"),
        (line() + "[]\n", ":2: Expected `object`, got `array`"),
        (line(tokens=-1), ":1: Expected `int` >= 1 - at `$.input_length`"),
        (line(hash_ids=None), ":1: Expected `array`, got `null` - at `$.hash_ids`"),
        ('{"timestamp": 0}\n', ":1: Object missing required field `input_length`"),
        (line(tokens=1025), ":1: 1025 tokens are 3 blocks of 512, but there are 2 hash_ids"),
        (line(5) + line(4), ":2: timestamp 4 is before that of the request above"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "is a CSV of lengths without block hashes; what is needed is"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load_trace(path)
    assert str(path) in caught.value.message
    assert complaint in caught.value.message


def test_missing_and_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        load_trace(tmp_path / "none.jsonl")
    for name, data in (("t.xz", lzma.compress(line().encode())[:-9]), ("t.gz", b"no gzip at all")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidRequest, match="damaged"):
            load_trace(tmp_path / name)


@given(tokens=st.integers(1, 200_000), output=st.integers(0, 2000), per_block=st.sampled_from([1, 4, 16, 64, 100, 512]))
def test_scaling_keeps_the_blocks(tokens: int, output: int, per_block: int) -> None:
    original = request(*range(-(-tokens // 512)), tokens=tokens, output=output)
    scaled = scale(original, per_block, max_output=50)
    assert scaled.hash_ids == original.hash_ids
    assert len(scaled.hash_ids) == -(-scaled.input_length // per_block)
    assert 1 <= scaled.output_length <= 50
    assert len(trace_tokens(scaled, per_block, VOCAB)) == scaled.input_length


def test_equal_ids_are_equal_prefixes_and_other_ids_are_not() -> None:
    first = trace_tokens(request(3, 9, 4, tokens=3 * 16), 16, VOCAB)
    second = trace_tokens(request(3, 9, 5, tokens=2 * 16 + 7), 16, VOCAB)
    assert (first[:32] == second[:32]).all()
    assert (first[32:39] != second[32:39]).any()
    assert first.dtype == np.uint32
    assert (first == trace_tokens(request(3, 9, 4, tokens=3 * 16), 16, VOCAB)).all()


@given(st.sets(st.integers(0, 2**62), min_size=2, max_size=40), st.sampled_from([64, 1000, VOCAB, 151_936]))
def test_no_two_ids_share_a_block_and_no_token_is_special(ids: set[int], vocab: int) -> None:
    small = {block % (vocab // 2) ** 4 for block in ids}
    blocks = [tuple(trace_tokens(request(block, tokens=16), 16, vocab)) for block in small]
    assert len(set(blocks)) == len(small)
    assert all(vocab // 32 <= token < vocab - vocab // 32 for block in blocks for token in block)


def test_the_tokens_of_a_trace_never_change() -> None:
    """Results recorded with one version must be comparable with the next."""
    tokens = trace_tokens(request(0, 46, tokens=14), 8, VOCAB)
    assert tokens.tolist() == [1536, 1536, 1536, 1536, 31508, 36828, 21868, 32020, 1582, 1536, 1536, 1536, 4356, 14179]


def test_hits_are_the_longest_cached_prefix() -> None:
    served = [
        request(0, 1, 2, tokens=1536),
        request(0, 1, 3, tokens=1100),  # two blocks known
        request(5, 1, 2, tokens=1536),  # a block without its predecessor is no hit
        request(0, 1, 2, tokens=1300),  # all known, the last one in part
    ]
    count = expected_hits(served)
    assert (count.requests, count.blocks, count.hit_blocks) == (4, 12, 5)
    assert (count.tokens, count.hit_tokens) == (5472, 1024 + 1300)
    assert count.request_mean_rate == pytest.approx((0 + 2 / 3 + 0 + 1) / 4)
    assert expected_hits(served, whole_blocks_only=True).hit_blocks == 4


def test_a_small_cache_forgets_the_least_recently_used() -> None:
    served = [request(*ids, tokens=512 * len(ids)) for ids in ((0, 1), (2,), (0,), (3,), (2,), (0,), (0,))]
    assert [expected_hits(served, capacity).hit_blocks for capacity in (None, 3, 2, 1, 0)] == [4, 4, 1, 1, 0]


def test_our_count_of_hits_is_the_count_of_block_keys() -> None:
    """Chained keys of the synthetic tokens share exactly the prefixes that the trace's ids share."""
    trace = [scale(request(*ids, tokens=512 * len(ids) - 100), 16) for ids in ((0, 1, 2), (0, 1, 3), (0, 1, 2, 4))]
    known: set[bytes] = set()
    hits = 0
    for entry in trace:
        keys = extend_chain(b"seed", trace_tokens(entry, 16, VOCAB), 16)
        hits += sum(key in known for key in keys)
        known.update(keys)
    assert hits == expected_hits(trace, tokens_per_block=16, whole_blocks_only=True).hit_blocks == 4


@pytest.mark.parametrize(
    ("name", "requests", "per_request_mean", "rates"),
    [
        (
            "conversation_trace.jsonl.xz",
            12_031,
            0.3843,
            {
                None: (0.3664, 0.3736),
                100_000: (0.3637, 0.3708),
                50_000: (0.3546, 0.3615),
                30_000: (0.3257, 0.3321),
                10_000: (0.2112, 0.2153),
                1_000: (0.0445, 0.0454),
            },
        ),
        (
            "synthetic_trace.jsonl",
            3_993,
            0.4232,
            {None: (0.6396, 0.6512), 30_000: (0.6242, 0.6356), 10_000: (0.4235, 0.4313), 1_000: (0.0825, 0.0840)},
        ),
    ],
)
def test_published_traces_give_their_known_hit_rates(
    name: str, requests: int, per_request_mean: float, rates: dict[int | None, tuple[float, float]]
) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"needs the open Mooncake trace {name} in {TRACES}")
    trace = load_trace(TRACES / name)
    assert len(trace) == requests
    assert expected_hits(trace).request_mean_rate == pytest.approx(per_request_mean, abs=5e-5)
    for capacity, (by_block, by_token) in rates.items():
        count = expected_hits(trace, capacity)
        assert (count.block_rate, count.token_rate) == (
            pytest.approx(by_block, abs=5e-5),
            pytest.approx(by_token, abs=5e-5),
        )
