"""Names of blocks: equal keys mean equal bytes, in every process, and nothing else does."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.hashing import Chain, chain_seed, extend_chain, extend_chain_plainly, kv_fingerprint, prepare
from mooncake.types import KVLayout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, block_tokens=4, head_dim=64, dtype="float32")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Build the native library first, so that no example waits for it."""
    prepare()


def test_the_chain_is_what_its_definition_says() -> None:
    seed = chain_seed("fingerprint", "salt")
    keys = extend_chain(seed, np.arange(10, dtype=np.uint32), 4)
    contents = [hashlib.blake2s(struct.pack("<4I", *block)).digest() for block in ((0, 1, 2, 3), (4, 5, 6, 7))]
    first = hashlib.blake2s(seed + contents[0]).digest()
    second = hashlib.blake2s(first + contents[1]).digest()
    assert keys == [first, second], "the two tokens left over name nothing"


def test_keys_are_the_same_in_every_process_and_for_ever() -> None:
    """A pool may outlive a release: if these values change, the scheme needs a new version."""
    code = """
import numpy as np
from mooncake.hashing import chain_seed, extend_chain
print(extend_chain(chain_seed("f", "s"), np.arange(8, dtype=np.uint32), 4)[-1].hex())
"""
    ours = extend_chain(chain_seed("f", "s"), np.arange(8, dtype=np.uint32), 4)[-1].hex()
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert ours == theirs.strip() == "485b265776f22ccd503f560dc2863d751ef539308b23214ae7da93aaa2d6456a"


@given(whole=tokens, cut=st.integers(0, 10), block_tokens=st.integers(1, 9))
def test_a_chain_may_be_extended_in_parts(whole: np.ndarray, cut: int, block_tokens: int) -> None:
    seed = chain_seed("f")
    keys = extend_chain(seed, whole, block_tokens)
    assert len(keys) == len(whole) // block_tokens
    cut = min(cut, len(keys))
    head = extend_chain(seed, whole[: cut * block_tokens], block_tokens)
    assert head == keys[:cut]
    assert extend_chain(head[-1] if head else seed, whole[cut * block_tokens :], block_tokens) == keys[cut:]


@given(one=tokens, other=tokens)
def test_a_key_names_everything_before_it(one: np.ndarray, other: np.ndarray) -> None:
    seed = chain_seed("f")
    for mine, yours, end in zip(
        extend_chain(seed, one, 4), extend_chain(seed, other, 4), range(4, 99, 4), strict=False
    ):
        assert (mine == yours) == (one[:end].tolist() == other[:end].tolist())


@pytest.mark.parametrize("dtype", [np.int64, ">u4", np.uint32])
def test_the_spelling_of_the_array_does_not_matter(dtype: str | type) -> None:
    ids = np.arange(12).astype(dtype)
    assert extend_chain(b"s", ids, 4) == extend_chain(b"s", np.arange(12, dtype=np.uint32), 4)
    assert extend_chain(b"s", np.repeat(ids, 2)[::2], 4) == extend_chain(b"s", ids, 4), "nor whether it is contiguous"


def test_whatever_makes_kv_bytes_differ_makes_the_seed_differ() -> None:
    prints = {
        kv_fingerprint("weights", LAYOUT),
        kv_fingerprint("other weights", LAYOUT),
        kv_fingerprint("weights", KVLayout(31, 3, 4, 64, "float32")),
        kv_fingerprint("weights", KVLayout(30, 4, 4, 64, "float32")),
        kv_fingerprint("weights", KVLayout(30, 3, 8, 64, "float32")),
        kv_fingerprint("weights", KVLayout(30, 3, 4, 32, "float32")),
        kv_fingerprint("weights", KVLayout(30, 3, 4, 64, "bfloat16")),
        kv_fingerprint("weights", KVLayout(30, 3, 4, 64, "float32", num_kinds=1)),
    }
    assert len(prints) == 8
    assert len({chain_seed(fingerprint) for fingerprint in prints}) == 8


def test_one_tenants_salt_reaches_no_other() -> None:
    seeds = {
        chain_seed(fingerprint, salt)
        for fingerprint, salt in [("f", ""), ("f", "a"), ("fa", ""), ("", "fa"), ("f", "aa")]
    }
    assert len(seeds) == 5, "and moving a letter from one to the other is no way around"


@given(st.binary(min_size=32, max_size=32), st.integers(1, 60), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_a_long_chain_is_hashed_as_its_blocks_one_by_one(parent: bytes, blocks: int, size: int, seed: int) -> None:
    """Sixteen contents are hashed in parallel; also the remaining ones, and blocks of odd sizes."""
    tokens = np.random.default_rng(seed).integers(0, 2**32, blocks * size, dtype=np.uint32)
    data = tokens.astype("<u4").tobytes()
    assert extend_chain(parent, tokens, size) == extend_chain_plainly(parent, data, 4 * size)


@given(whole=tokens, start=st.integers(0, 50), block_tokens=st.integers(1, 9), cut=st.integers(0, 40))
def test_blocks_before_an_adapter_begins_to_act_have_the_models_own_names(
    whole: np.ndarray, start: int, block_tokens: int, cut: int
) -> None:
    own = extend_chain(chain_seed("f", "s"), whole, block_tokens)
    chain = Chain.of("f", "s", "digest", start)
    keys = chain.keys(whole, block_tokens)
    before = min(start // block_tokens, len(own)) if start else 0
    assert len(keys) == len(own) and keys[:before] == own[:before] and not set(keys[before:]) & set(own)
    told = chain.keys(whole[:cut], block_tokens)
    chain.extend(told, whole, block_tokens)
    assert told == keys, "named as they came"


def test_where_an_adapter_begins_is_part_of_all_names_behind() -> None:
    """An invocation may end in the next block, so a block's tokens alone do not determine where the adapter starts."""
    ids = np.arange(12, dtype=np.uint32)
    chains = [Chain.of("f", "", adapter, start).keys(ids, 4) for adapter in ("a", "b") for start in (0, 4, 5, 7)]
    names = [key for start, keys in zip((0, 1, 1, 1) * 2, chains, strict=True) for key in keys[start:]]
    assert len(set(names)) == len(names)
    assert Chain.of("f", "", "a", 0).keys(ids, 4) == extend_chain(chain_seed("f", "", "a"), ids, 4)
    assert Chain.of("f", "", "", 5).keys(ids, 4) == extend_chain(chain_seed("f"), ids, 4), "no adapter begins nowhere"


def test_names_behind_the_beginning_of_an_adapter_are_the_same_for_ever() -> None:
    last = Chain.of("f", "s", "d", 5).keys(np.arange(8, dtype=np.uint32), 4)[-1]
    assert last.hex() == "b05d02bc749fc2edfb5807728f58d0f3bbde040d27d74f427019c1ebeac3c8be"
