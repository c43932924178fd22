"""Before anything starts, a launcher says in one sentence what would go wrong."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quantised import int8, write_quantised
from tiny_model import write_tiny_model

from mooncake.app.cluster import preflight
from mooncake.app.cluster.preflight import (
    available_cores,
    check_choices,
    check_memory,
    check_ports,
    cores_of_nodes,
    decode_share,
    free_port,
    hold_ports,
    memory_need,
    openmp_threads,
    port_holder,
    resolve,
    share_cards,
    spare_gb,
)
from mooncake.app.extras import MissingDependency
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.errors import ConfigError
from mooncake.sizing import parameter_count


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("conductor.policy", "milliseconds, algorithm_1, "),
        ("conductor.admission", "none, baseline, early, predicted, lookahead, "),
        ("conductor.admission_mode", "off, soft, hard, "),
        ("conductor.reasoning_parser", "auto, none, qwen3, "),
        ("conductor.tool_call_parser", "auto, hermes, "),
        ("store.eviction", "lru, fifo, "),
    ],
)
def test_a_name_that_does_not_exist_is_told_beside_those_that_do(key: str, known: str) -> None:
    check_choices(load_config())
    with pytest.raises(ConfigError) as caught:
        check_choices(load_config(None, [f"{key}=nope"]))
    assert caught.value.message.startswith(f"{key} must be one of {known}")
    assert caught.value.message.endswith(", got 'nope'")


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry"]
)
def test_traces_that_cannot_be_sent_are_refused_with_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = load_config(None, ["conductor.otlp_traces_endpoint=http://127.0.0.1:4317"])
    check_choices(traced)
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it was not installed
    check_choices(load_config())
    with pytest.raises(MissingDependency, match=r"otlp_traces_endpoint needs .*'mooncake-cluster\[tracing\]'"):
        check_choices(traced)


def test_a_taken_port_is_named_with_its_flag_and_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for flag, key in (("--http-port", "http_port"), ("--grpc-port", "grpc_port")):
            config = resolve(
                load_config(None, ["conductor.http_port=0", "conductor.grpc_port=0", f"conductor.{key}={port}"])
            )
            with pytest.raises(ConfigError) as caught:
                check_ports(config)
            assert caught.value.message == (
                f"port {port} is taken by process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()}); "
                f"choose another with {flag}, or stop that process"
            )
    assert port_holder(port) == ""


def test_both_taken_ports_are_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        http, grpc = one.getsockname()[1], two.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_ports(load_config(None, [f"conductor.http_port={http}", f"conductor.grpc_port={grpc}"]))
    assert f"port {http} is taken" in caught.value.message and f"port {grpc} is taken" in caught.value.message


def test_free_ports_pass_and_equal_ports_do_not() -> None:
    check_ports(resolve(load_config(None, ["conductor.http_port=0", "conductor.grpc_port=0"])))
    port = free_port("127.0.0.1")
    with pytest.raises(ConfigError, match=f"both {port}"):
        check_ports(load_config(None, [f"conductor.http_port={port}", f"conductor.grpc_port={port}"]))


def test_an_address_of_another_machine_is_refused() -> None:
    config = load_config(None, ["conductor.host=192.0.2.1", "conductor.http_port=18000", "conductor.grpc_port=18001"])
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:18000: .*set conductor\.host"):
        check_ports(config)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .*set conductor\.host"):
        resolve(load_config(None, ["conductor.host=192.0.2.1", "conductor.http_port=0"]))


def test_threads_are_shared_among_the_compute_nodes() -> None:
    config = resolve(load_config(None, ["cluster.prefill=1", "cluster.decode=1", "decode.threads=7"]))
    share = max(1, available_cores() // 2)
    assert config.prefill.threads == min(2 * share, available_cores())
    assert config.decode.threads == 7
    assert openmp_threads(config.prefill, config) == openmp_threads(config.decode, config) == share
    assert resolve(load_config(None, ["cluster.pin=true"])).prefill.threads == share
    assert resolve(load_config(None, ["cluster.prefill=500"])).prefill.threads == min(2, available_cores())


def test_memory_is_counted_for_every_node() -> None:
    checkpoint = open_checkpoint("smollm2")
    model = checkpoint.config
    assert parameter_count(model) == 134_515_008
    experts = replace(model, architecture="qwen3_moe", num_experts=8, experts_per_token=2)
    assert parameter_count(experts) > parameter_count(model) + 7 * model.num_layers * 3 * 576 * 1536
    sizes = ["cluster.prefill=2", "prefill.kv_gb=3", "decode.kv_gb=5", "store.dram_gb=7"]
    need = memory_need(load_config(None, sizes), checkpoint)
    assert need.weights_gb == pytest.approx(3 * 0.1115, rel=0.01), "codes of 4 and 8 bits, with their scales"
    config = load_config(None, [*sizes, "model.weights=plain"])
    need = memory_need(config, checkpoint)
    assert (need.kv_gb, need.store_gb) == (11 + 3 * 0.25, 7), "with what is kept of preempted sequences"
    assert need.weights_gb == pytest.approx(3 * 0.538, rel=0.01)

    check_memory(config, checkpoint, available_gb=30)
    with pytest.raises(ConfigError, match=r"needs 2\d\.\d GB of memory .* and 8\.0 GB are available; lower"):
        check_memory(config, checkpoint, available_gb=8)


def test_caches_whose_size_is_left_to_nodes_take_equal_parts_of_what_is_left() -> None:
    checkpoint = open_checkpoint("smollm2")
    config = load_config(None, ["cluster.prefill=2", "cluster.decode=1", "store.dram_gb=1", "decode.kv_gb=0.5"])
    fixed = memory_need(load_config(None, ["prefill.kv_gb=1", "decode.kv_gb=0.5", "cluster.prefill=2"]), checkpoint)
    others_gb = fixed.total_gb - 2
    assert spare_gb(config, checkpoint, others_gb + 6) == pytest.approx(3)
    assert spare_gb(config, checkpoint, others_gb - 1) == 0
    assert memory_need(config, checkpoint).total_gb == fixed.total_gb, "a gigabyte each, where nobody knows"
    assert memory_need(config, checkpoint, others_gb + 6).total_gb == fixed.total_gb
    tight = memory_need(config, checkpoint, others_gb + 0.8)
    assert tight.total_gb == pytest.approx(others_gb + 0.8), "smaller ones where there is less"
    check_memory(config, checkpoint, others_gb + 0.8)
    with pytest.raises(ConfigError, match="this cluster needs"):
        check_memory(config, checkpoint, others_gb - 0.1)
    both = load_config(None, ["cluster.switchable=true", "prefill.kv_gb=3"])
    assert memory_need(both, checkpoint).kv_gb == 2 * (3 + 0.25), "the larger one of both roles"


def test_nodes_that_start_on_one_gpu_share_it() -> None:
    def shares(*settings: str) -> tuple[float, float]:
        config = share_cards(load_config(None, list(settings)))
        return config.prefill.gpu_memory_utilization, config.decode.gpu_memory_utilization

    on_cards = ["prefill.device='cuda:0'", "decode.device='cuda:1'"]
    assert shares() == (0, 0)
    assert shares(*on_cards) == (0.9, 0.9)
    assert shares("prefill.device='cuda'", "decode.device='cuda:0'") == (0.45, 0.45)
    assert shares(*on_cards, "cluster.decode=3") == pytest.approx((0.9, 0.3))
    assert shares(*on_cards, "prefill.tensor_parallel=2") == (0.45, 0.45), "its second rank is on the other's GPU"
    assert shares("prefill.device='cuda'", "cluster.coupled=2") == (0.45, 0)
    given = ["prefill.device='cuda'", "decode.device='cuda'", "decode.gpu_memory_utilization=0.6"]
    assert shares(*given) == pytest.approx((0.3, 0.6))
    with pytest.raises(ConfigError, match=r"nodes on cuda:0 ask for 0\.6 \+ 0\.6 of it"):
        shares(*given, "cluster.decode=2")


def test_codes_that_are_used_as_they_are_take_a_byte_each(tmp_path: Path) -> None:
    theirs = write_tiny_model(tmp_path, hidden_size=64, head_dim=16)
    write_quantised(tmp_path, theirs, int8())
    checkpoint = open_checkpoint(str(tmp_path))
    auto, plain = (
        memory_need(load_config(None, [f"model.weights={weights}"]), checkpoint) for weights in ("auto", "plain")
    )
    assert checkpoint.num_codes == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 48 * 64)
    assert plain.weights_gb - auto.weights_gb == pytest.approx(2 * 3 * checkpoint.num_codes / 1e9), "on two nodes"


def test_weights_on_a_gpu_take_no_memory_of_the_host() -> None:
    plain, on_gpu = ["model.weights=plain", "prefill.kv_gb=1", "decode.kv_gb=1"], "prefill.device='cuda'"
    on_both, on_one = (
        memory_need(load_config(None, given), open_checkpoint("smollm2")) for given in (plain, [*plain, on_gpu])
    )
    assert on_one.weights_gb == on_both.weights_gb / 2
    assert on_one.kv_gb == on_both.kv_gb  # its mirror


def test_a_free_port_is_not_the_one_that_is_meant_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may return the same port twice; here it does, until the port is held."""
    port = free_port("127.0.0.1")
    bound = preflight._bound

    def same_again(host: str, wanted: int) -> socket.socket:
        try:
            return bound(host, port)
        except OSError:
            return bound(host, wanted)

    monkeypatch.setattr(preflight, "_bound", same_again)
    assert free_port("127.0.0.1") == port
    config = resolve(load_config(overrides=["conductor.http_port=0", "conductor.grpc_port=0"])).conductor
    assert {config.http_port, config.grpc_port} > {port}


IP_LOCAL_PORT_RANGE = 51  # <linux/in.h>, since 6.3


def test_held_ports_are_for_who_names_them() -> None:
    config = resolve(load_config(overrides=["conductor.http_port=0", "conductor.grpc_port=0"]))
    held = hold_ports(config)
    ports = {config.conductor.http_port, config.conductor.grpc_port}
    assert {one.getsockname()[1] for one in held} == ports
    check_ports(config)
    for port in ports:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                only = struct.pack("=HH", port, port)  # the system has but this one to give
                other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
            except OSError:
                pytest.skip("this kernel cannot be told which ports to give")
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", 0))
    for one in held:
        one.close()


@pytest.mark.skipif(available_cores() < 2, reason="one core cannot be shared out")
def test_pinned_nodes_get_cores_of_their_own_or_a_sentence() -> None:
    one_thread = ["prefill.threads=1", "decode.threads=1"]
    assert cores_of_nodes(load_config(overrides=one_thread)) == {}
    pinned = cores_of_nodes(load_config(overrides=["cluster.pin=true", "cluster.decode=1", *one_thread]))
    assert set(pinned) == {"prefill-0", "decode-0"}
    assert all(len(cores) == 1 for cores in pinned.values())
    assert pinned["prefill-0"] != pinned["decode-0"]
    many = load_config(overrides=["cluster.pin=true", "prefill.threads=500", "decode.threads=1"])
    with pytest.raises(ConfigError, match=r"cluster\.pin needs 501 cores for the threads of 2 nodes"):
        cores_of_nodes(many)


@pytest.mark.skipif(available_cores() < 2, reason="one core cannot be shared out")
def test_the_stages_of_a_node_count_as_its_threads_and_processes() -> None:
    stages = ["cluster.coupled=1", "prefill.pipeline_stages=2", "prefill.threads=1"]
    assert len(cores_of_nodes(load_config(overrides=["cluster.pin=true", *stages]))["coupled-0"]) == 2
    settled = resolve(load_config(overrides=[*stages, "prefill.threads=0"]))
    assert settled.prefill.threads == available_cores() // 2
    whole, cut = (memory_need(load_config(overrides=each), open_checkpoint("smollm2")) for each in (stages[:1], stages))
    assert cut.processes_gb > whole.processes_gb and cut.weights_gb == whole.weights_gb


@pytest.mark.skipif(available_cores() < 2, reason="one core cannot be shared out")
def test_the_ranks_of_a_node_count_as_its_threads_and_processes() -> None:
    alone = ["cluster.prefill=1", "cluster.decode=1", "model.weights=plain"]
    ranks = [*alone, "prefill.tensor_parallel=2", "decode.tensor_parallel=3", "prefill.threads=1"]
    config = load_config(overrides=[*ranks, "decode.threads=1"])
    assert (config.prefill.all_threads, config.decode.all_threads) == (2, 3)
    settled = resolve(load_config(overrides=["prefill.tensor_parallel=2", "cluster.coupled=1"]))
    assert settled.prefill.threads == available_cores() // 2
    model = open_checkpoint("smollm2")
    one_each, several = (memory_need(load_config(overrides=each), model) for each in (alone, ranks))
    assert several.processes_gb - one_each.processes_gb == pytest.approx(3 * preflight.ENGINE_OVERHEAD_GB)
    assert (several.weights_gb, several.kv_gb) == (one_each.weights_gb, one_each.kv_gb)


def test_a_process_stays_on_the_cores_it_was_given() -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        "import os\nfrom mooncake.app.cluster.role_main import pin_to\n"
        f"pin_to(({core},))\nprint(sorted(os.sched_getaffinity(0)))\npin_to((9999,))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == f"[{core}]"
    assert "cannot run on the cores [9999] (node.cores)" in done.stderr


def test_decode_gives_way_only_where_it_shares_cores_with_prefill() -> None:
    cores = available_cores()
    shared = [f"prefill.threads={cores}", f"decode.threads={cores}"]
    assert decode_share(load_config(overrides=shared)) == 0.33
    assert decode_share(load_config(overrides=[*shared, "cluster.switchable=true"])) == 0.33
    assert decode_share(load_config(overrides=[*shared, "cluster.decode_share=0.5"])) == 0.5
    for alone in ("prefill.device='cuda'", "cluster.pin=true", "cluster.coupled=1"):
        assert decode_share(load_config(overrides=[*shared, alone])) == 1
    if cores > 1:
        assert decode_share(load_config(overrides=["prefill.threads=1", "decode.threads=1"])) == 1
    for nonsense in (0, 1.5, "nan"):
        with pytest.raises(ConfigError, match=r"cluster\.decode_share must be between 0\.01 and 1"):
            load_config(overrides=[f"cluster.decode_share={nonsense}"])
