"""The configuration: a file, overrides, and an error of one sentence for every mistake in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.config import Config, dump_toml, load_config, transfer_secret
from mooncake.errors import ConfigError


def problem(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, list(overrides))
    return refused.value.message


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == Config()


def test_a_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[prefill]\nchunk_tokens = 128\nkv_gb = 2\n[model]\nname = "demo"\n')
    config = load_config(file, ["prefill.chunk_tokens=512", "decode.kv_gb=0.5"])
    assert (config.prefill.chunk_tokens, config.prefill.kv_gb, config.decode.kv_gb) == (512, 2.0, 0.5)
    assert config.model.name == "demo"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.path=/models/a b", "/models/a b"),
        ("model.path=smollm2", "smollm2"),
        ('model.path="quoted = #"', "quoted = #"),
        (" model.path = spaced ", "spaced"),
        ("model.path=a=b", "a=b"),
        ("model.path=", ""),
    ],
)
def test_bare_words_are_strings(override: str, value: str) -> None:
    assert load_config(None, [override]).model.path == value


def test_lists_are_given_as_toml_has_them() -> None:
    assert load_config(None, ['transfer.transports=["tcp"]']).transfer.transports == ("tcp",)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("prefill.chunk_token=5", "unknown configuration key prefill.chunk_token; did you mean prefill.chunk_tokens?"),
        ("prefil.chunk_tokens=5", "unknown configuration key prefil; did you mean prefill?"),
        ("zzz.x=1", "unknown configuration key zzz; known: model, block, conductor"),
        ("prefill.chunk_tokens", "--set takes section.key=value"),
        ("chunk_tokens=5", "--set takes section.key=value"),
        ("=5", "--set takes section.key=value"),
        (".a=5", "--set takes section.key=value"),
        ("prefill.=5", "--set takes section.key=value"),
        ("prefill.chunk_tokens=many", "prefill.chunk_tokens: Expected `int`, got `str`"),
        ("model.path=5", "Expected `str`, got `int`"),
        ("transfer.transports=tcp", 'Expected `array`, got `str`; a list is written ["a", "b"]'),
        ("conductor.balance=True", "Expected `bool`, got `str`; it is true or false"),
        ("prefill.chunk_tokens=-2", "prefill.chunk_tokens must not be negative"),
        ("model.generation_config=mine", "model.generation_config must be auto, none or vllm, got 'mine'"),
        ("prefill.blend_share=1.5", "prefill.blend_share is a share, at most 1, got 1.5"),
        ("prefill.blend_share=-0.1", "prefill.blend_share must not be negative"),
        ("prefill.variant_pools=['a:1']", "prefill.variant_pools needs prefill.variant"),
        ("decode.blend_share=0.1", "unknown configuration key decode.blend_share"),
        ("prefill.kv_gb=-1e-9", "prefill.kv_gb must not be negative"),
        ("decode.kv_gb=-1", "decode.kv_gb must not be negative"),
        ("decode.kv_gb=nan", "decode.kv_gb must not be negative"),
        ("decode.kv_gb=inf", "decode.kv_gb must not be negative"),
        ("prefill.gpu_memory_utilization=1.1", "prefill.gpu_memory_utilization must be between 0 and 1"),
        ("decode.gpu_memory_utilization=-0.1", "decode.gpu_memory_utilization must be between 0 and 1"),
        ("decode.gpu_memory_utilization=nan", "decode.gpu_memory_utilization must be between 0 and 1"),
        ("node.spare_gb=-1", "node.spare_gb must not be negative"),
        ("store.dram_gb=nan", "store.dram_gb must be positive"),
        ("store.dram_gb=0", "store.dram_gb must be positive"),
        ("store.lease_s=0", "store.lease_s must be positive"),
        ("transfer.handoff_timeout_s=-3", "transfer.handoff_timeout_s must be positive"),
        ("transfer.max_mb_per_s=-1", "transfer.max_mb_per_s must not be negative"),
        ("conductor.node_timeout_s=0", "conductor.node_timeout_s must be positive"),
        ("conductor.heartbeat_interval_s=0", "conductor.heartbeat_interval_s must be at least 0.01"),
        ("conductor.heartbeat_interval_s=1e-9", "conductor.heartbeat_interval_s must be at least 0.01"),
        (
            "conductor.heartbeat_interval_s=2",
            "conductor.node_timeout_s must be at least 3 times conductor.heartbeat_interval_s (2), got 5",
        ),
        ("conductor.node_wait_s=nan", "conductor.node_wait_s must not be negative"),
        ("conductor.node_wait_s=-1", "conductor.node_wait_s must not be negative"),
        ("health.probe_interval_s=1e-9", "health.probe_interval_s must be at least 0.01"),
        ("store.block_bytes=-5", "store.block_bytes must not be negative"),
        ("pool_layout.dtype=x", "pool_layout.dtype must be one of float32, bfloat16, int8, got 'x'"),
        ("conductor.request_timeout_s=nan", "conductor.request_timeout_s must be positive"),
        ("conductor.max_requests=0", "conductor.max_requests must be at least 1"),
        ("conductor.retries=-1", "conductor.retries must not be negative"),
        ('conductor.allowed_origins=["host"]', "conductor.allowed_origins: an origin is"),
        ("conductor.http_port=70000", "conductor.http_port must be between 0 and 65535"),
        ("conductor.grpc_port=-1", "conductor.grpc_port must be between 0 and 65535"),
        ("node.port=65536", "node.port must be between 0 and 65535"),
        ("node.drain_s=-1", "node.drain_s must not be negative"),
        ("node.host=0.0.0.0", "node.host: '0.0.0.0' stands for all addresses of this machine"),
        ("node.host='::'", "name it as node.advertise"),
        ("node.advertise=0.0.0.0", "name it as node.advertise"),
        ("decode.max_sequences=-1", "decode.max_sequences must be at least 1"),
        ("decode.threads=-1", "decode.threads must not be negative"),
        ("prefill.device=gpu", 'prefill.device must be "cpu", "cuda" or "cuda:N", got \'gpu\''),
        ("model.dtype=int4", "model.dtype must be one of auto, float32, bfloat16, got 'int4'"),
        ("model.kv_dtype=int4", "model.kv_dtype must be one of auto, float32, bfloat16, int8, got 'int4'"),
        ("model.weights=w4a4", "model.weights must be one of auto, plain, stored, stored_a8, int8, w8a8, got 'w4a4'"),
        ("model.max_model_len=-1", "model.max_model_len must not be negative"),
        ("block.tokens=0", "block.tokens must be between 1 and 1024"),
        ("transfer.transports=[]", "must name at least one"),
        ('transfer.transports=["ib"]', "unknown transports ['ib']"),
        ("transfer.streams=17", "transfer.streams must be between 1 and 16"),
        (f"prefill.kv_gb={'[' * 100_000}", "prefill.kv_gb: Expected `float`, got `str`"),
        (f"prefill.kv_gb={'1' * 5000}", "prefill.kv_gb: Expected `float`, got `str`"),
        ("cluster.prefill=0", "cluster.prefill must be at least 1"),
        ("cluster.store=2", "cluster.store must be 0 or 1"),
    ],
)
def test_what_is_wrong_is_said_with_its_name(override: str, sentence: str) -> None:
    assert sentence in problem(override)


NUMBERS = [
    f"{section}.{key}"
    for section, values in msgspec.to_builtins(Config()).items()
    for key, value in values.items()
    if type(value) in (int, float)
]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_without_a_bound(name: str) -> None:
    least = "-2" if name.endswith(".chunk_tokens") else "-1"  # -1 is as the device says
    for value in (least, "nan", "1000000000000000"):
        assert name in problem(f"{name}={value}")


def test_a_node_may_miss_two_heartbeats() -> None:
    load_config(None, ["conductor.heartbeat_interval_s=0.1", "conductor.node_timeout_s=0.3"])


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_prompts_that_are_never_cut_keep_no_limit(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.tbt_limit_ms cuts prompts, and {name}.chunk_tokens = 0"):
        load_config(None, [f"{name}.tbt_limit_ms=50", f"{name}.chunk_tokens=0"])


def test_a_secret_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        transfer_secret(load_config(None, [f"transfer.secret_file={tmp_path / 'none'}"]))
    assert refused.value.message == f"transfer.secret_file: cannot read {tmp_path / 'none'}: No such file or directory"


@pytest.mark.parametrize(
    "name",
    [
        *("conductor.calibration", "store.ssd_path", "prefill.variant", "transfer.secret_file"),
        *(f"{section}.ssl_{what}" for section in ("conductor", "node") for what in ("certfile", "keyfile", "ca_certs")),
    ],
)
def test_a_path_may_begin_at_home(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SSD tier was kept in a folder called ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    section, _, key = name.partition(".")
    needed = [f"{section}.ssl_certfile=/c"] if key in ("ssl_keyfile", "ssl_ca_certs") else []
    config = load_config(None, [f"{name}=~/here", *needed])
    assert getattr(getattr(config, section), key) == str(tmp_path / "here")
    assert f"cannot read {tmp_path / 'here'}" in problem("model.kv_dtype=int8", "model.key_scales=~/here")


def test_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    assert "cannot read the configuration" in problem(path=file)
    assert "cannot read the configuration" in problem(path=tmp_path)
    file.write_text("[prefill\n")
    assert "is not valid TOML" in problem(path=file)
    file.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in problem(path=file)
    for text in ("a = " + "[" * 100_000, "a = " + "1" * 5000):
        file.write_text(text)
        assert "is not valid TOML" in problem(path=file)
    file.write_text("prefill = 5\n")
    assert "prefill must be a table, got 5" in problem(path=file)
    assert "[prefill] must be a table" in problem("prefill.kv_gb=1", path=file)


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ([], "127.0.0.1:50051"),
        (["conductor.host=::1", "conductor.grpc_port=7"], "[::1]:7"),
        (["node.conductor=10.0.0.1:9"], "10.0.0.1:9"),
    ],
)
def test_nodes_know_where_the_conductor_is(overrides: list[str], address: str) -> None:
    assert load_config(None, overrides).conductor_address == address


def mutated(draw: Any) -> Config:
    """A valid configuration with other texts and numbers in it."""
    texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
    tree = msgspec.to_builtins(Config())
    for section, key in (("model", "path"), ("model", "name"), ("node", "id"), ("node", "conductor")):
        tree[section][key] = draw(texts)
    positive = st.floats(min_value=1e-300, max_value=1e14)
    for section, key in (("store", "dram_gb"), ("prefill", "kv_gb"), ("store", "lease_s")):
        tree[section][key] = draw(positive)
    tree["prefill"]["chunk_tokens"] = draw(st.integers(0, 2**40))
    tree["transfer"]["transports"] = draw(st.sampled_from([["shm"], ["tcp", "shm"]]))
    return msgspec.convert(tree, Config)


@given(config=st.composite(mutated)())
def test_what_is_written_is_read_back(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "written.toml"
    for encoding in ("utf-8", "utf-8-sig"):  # some editors write the mark of the second
        file.write_text(dump_toml(config), encoding=encoding, newline="")
        assert load_config(file) == config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["prefill.variant=p", "cluster.switchable=true"], "prefill.variant is for nodes that do nothing but prefill"),
        (["prefill.variant=p", "cluster.coupled=2"], "prefill.variant is for nodes that do nothing but prefill"),
        (["prefill.variant=p", "prefill.blend_share=0.1"], "prefill.variant excludes prefill.blend_share"),
        (["model.keep_hidden=[3]", "prefill.blend_share=0.1"], "model.keep_hidden excludes"),
        (["model.keep_hidden=[3]", "pool_layout.tensor_parallel=2"], "model.keep_hidden excludes"),
        *(
            ([f"{name}=2", other], rf"{name} does not go together with {other.partition('=')[0]}")
            for name in ("prefill.tensor_parallel", "decode.tensor_parallel")
            for other in ("model.adapters=['a=/nowhere']", "model.key_scales=/nowhere", "cluster.switchable=true")
        ),
        (["prefill.tensor_parallel=2", "prefill.pipeline_stages=2"], "together with prefill.pipeline_stages"),
        (["prefill.tensor_parallel=2", "prefill.context_parallel=2"], "together with prefill.context_parallel"),
        (["prefill.tensor_parallel=2", "prefill.blend_share=0.1"], "together with prefill.blend_share"),
        (["prefill.pipeline_stages=2", "prefill.device=cuda"], "together with a GPU as prefill.device"),
        (["prefill.context_parallel=2", "prefill.device=cuda:1"], "together with a GPU as prefill.device"),
        (["decode.tensor_parallel=0"], "decode.tensor_parallel must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, overrides)


def test_the_two_roles_may_have_any_processes_each() -> None:
    for overrides in (
        ["decode.tensor_parallel=2", "prefill.pipeline_stages=2"],
        ["decode.tensor_parallel=2", "prefill.context_parallel=2"],
        ["decode.tensor_parallel=2", "prefill.blend_share=0.1"],
        ["decode.tensor_parallel=4", "prefill.tensor_parallel=2"],
        ["decode.tensor_parallel=4", "decode.device=cuda:2", "prefill.tensor_parallel=2", "prefill.device=cuda"],
    ):
        load_config(None, overrides)
