"""The commands around the simulator: traces in either form, generated and scaled ones, clusters, sweeps and pages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from mooncake.app.cli.main import app
from mooncake.app.reproduction.experiments import Traces
from mooncake.app.reproduction.findings import Finding, Row
from mooncake.app.reproduction.reproduce import markdown, page, reproduce
from mooncake.app.sim.cluster import load_cluster, load_preset, preset_names, preset_text
from mooncake.app.sim.output.charts import BOTTOM, HEIGHT
from mooncake.app.sim.output.page import over_time
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.files import load_any, one_after_another
from mooncake.app.traces.shapes import generate
from mooncake.errors import ConfigError, InvalidRequest
from mooncake.trace import ResampledTrace, expected_hits, load_trace, save_trace, scale

TIMES = {"wall_s", "peak_memory_gb"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.xz"
    save_trace(generate("conversation", 150, 3), path)
    return path


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("end", ["", ".xz", ".gz"])
def test_published_traces_are_found_as_they_are_published_and_compressed(tmp_path: Path, end: str) -> None:
    save_trace(generate("conversation", 5, 3), tmp_path / f"conversation_trace.jsonl{end}")
    traces = Traces(tmp_path)
    assert len(traces.conversation()) == 5 and not traces.has_toolagent
    assert [used.partition(",")[0] for used in traces.used] == [f"conversation_trace.jsonl{end}"]


def test_a_folder_without_the_traces_is_told_which_one_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks conversation_trace\.jsonl, plain"):
        reproduce(tmp_path, tmp_path / "out", ["fig5"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_preset_reads_and_runs() -> None:
    for name in preset_names():
        cluster = load_preset(name)
        tokens = math.gcd(cluster.model.block_tokens, 512)
        requests = [scale(request, min(tokens, 64)) for request in generate("conversation", 8, 1)]
        results = Simulation(cluster, requests, Run(tokens_per_block=min(tokens, 64))).run()
        assert (results.fate == 1).all(), name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("[conductor]", "[model]\nblock_tokens = 0\n[conductor]"), "block_tokens"),
        (('policy = "round_robin"', 'polycy = "round_robin"'), "`polycy` - at `$.conductor`; did you mean policy?"),
        (("count = 16", "count = 16\nstore_token = 1"), "at `$.machines[0]`; did you mean store_tokens?"),
        (("[conductor]", "colour = 1\n[conductor]"), "known: role, count, curve"),
        (('curve = "a800-llama3-70b"', 'curve = "b800"'), "b800"),
        (("count = 16", "count = 0"), "count"),
        (('role = "coupled"', 'role = "decode"'), "prefill"),
        (('role = "coupled"', 'store_tokens = 1\nrole = "coupled"'), "store_tokens says nothing of coupled machines"),
        (("[conductor]", "[conductor"), "TOML"),
        (
            ('extends = "paper-16"', 'extends = "paper16"'),
            "extends: no preset is called 'paper16'; did you mean 'paper-16'?",
        ),
        (('extends = "paper-16"', "extends = 16"), "extends: it takes the name of a preset or of a .toml file, got 16"),
        (('name = "vllm-16"', ""), "name"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused_with_its_reason(
    change: tuple[str, str], complaint: str, tmp_path: Path
) -> None:
    text, mine = preset_text("vllm-16"), tmp_path / "mine.toml"
    assert change[0] in text
    mine.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=r"mine\.toml") as error:
        load_cluster(mine)
    assert complaint in str(error.value) or complaint == "TOML"


def test_a_cluster_says_only_what_is_otherwise_than_in_another(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    base, mine = tmp_path / "shared" / "base.toml", tmp_path / "mine.toml"
    text = 'name = "base"\nextends = "paper-16"\nnote = "of base"\n[slo]\ntbt_ms = 50.0\n'
    base.write_text(text, encoding="utf-8-sig")  # with the mark that some editors write
    mine.write_text('name = "mine"\nextends = "shared/base.toml"\n[curves.a800-llama3-70b]\nprefix_ms = 1.0\n')
    paper, found = load_preset("paper-16"), load_cluster(mine)

    assert (found.name, found.note) == ("mine", "")  # a note is about one cluster
    assert found.machines == paper.machines and found.model == paper.model
    assert (found.slo.ttft_s, found.slo.tbt_ms) == (paper.slo.ttft_s, 50.0)
    [(name, curve)] = paper.curves.items()
    assert found.curves == {name: msgspec.structs.replace(curve, prefix_ms=1.0)}

    mine.write_text(f'{mine.read_text()}[[machines]]\nrole = "prefill"\ncount = 1\ncurve = "{name}"\n')
    assert [group.role for group in load_cluster(mine).machines] == ["prefill"]  # in place of all there


def test_a_mistake_is_told_of_the_file_that_it_is_in(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('name = "one"\nextends = "two.toml"\n')
    with pytest.raises(ConfigError, match=r"one\.toml: extends: cannot read the cluster file .*two\.toml"):
        load_cluster(one)
    two.write_text('name = "two"\nextends = "paper-16"\nlatency = 1.0\n')
    with pytest.raises(ConfigError, match=r"two\.toml: .*latency"):
        load_cluster(one)
    two.write_text('name = "two"\nextends = "./one.toml"\n')
    with pytest.raises(ConfigError, match=r"one\.toml: no cluster extends itself: .*one\.toml extends .*two\.toml ext"):
        load_cluster(one)
    two.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"two\.toml: it is not text"):
        load_cluster(two)


def test_a_preset_that_is_nearly_right_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'paper-16'"):
        load_preset("paper16")


@pytest.mark.parametrize("command", ["simulate", "sweep"])
def test_presets_are_listed_without_a_trace(command: str) -> None:
    output = call(command, "--preset", "help")
    assert all(name in output for name in preset_names())
    assert max(map(len, output.splitlines())) <= 100


def test_simulate_prints_the_same_line_twice(trace: Path) -> None:
    lines = [json.loads(call("simulate", trace, "--preset", "paper-16", "--json")) for _ in range(2)]
    assert lines[0].keys() >= TIMES
    first, second = ({key: value for key, value in line.items() if key not in TIMES} for line in lines)
    assert json.dumps(first) == json.dumps(second)
    assert first["requests"] == first["done"] == 150


def test_a_preset_with_other_machines_is_not_told_as_it_was(trace: Path) -> None:
    note = load_preset("paper-16").note
    for count, is_told in (("8", True), ("100", False)):
        said = call("simulate", trace, "--preset", "paper-16", "--prefill", count)
        assert (note in " ".join(said.split())) == is_told


def test_simulate_writes_a_page_that_needs_nothing_else_and_every_request(trace: Path, tmp_path: Path) -> None:
    page, requests = tmp_path / "page.html", tmp_path / "requests.jsonl"
    call("simulate", trace, "--preset", "paper-16", "--report", page, "--requests", requests)
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 8
    assert "http" not in text.replace("http://www.w3.org", "") and "NaN" not in text and "nan," not in text
    [steps] = re.findall(r'>One decode step<.*?polyline points="([^"]*)"', text)
    assert all(float(point.partition(",")[2]) < HEIGHT - BOTTOM for point in steps.split()), "no step took no time"
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    assert len(rows) == 150 and all(row["ttft_s"] > 0 for row in rows)


@pytest.mark.slow
def test_sweep_varies_one_thing(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.html"
    output = call(
        "sweep", trace, "--preset", "paper-16", "--vary", "bandwidth", "--values", "10,400", "--json", "--plot", plot
    )
    slow, fast = map(json.loads, output.splitlines())
    assert (slow["value"], fast["value"]) == ("10", "400")
    assert slow["ttft_s"]["mean"] > fast["ttft_s"]["mean"]
    assert plot.read_text().count("<svg") == 4
    split = ("--preset", "paper-16", "--limit", "2", "--vary", "split")
    for values, last in (("5:11,8:8", "8:8"), (",".join(["8:8"] * 30), "29")):  # of many, the marks are numbers
        call("sweep", trace, *split, "--values", values, "--report", plot)
        assert plot.read_text().count(f">{last}</text>") == 4


@pytest.mark.parametrize(
    ("preset", "vary", "value", "complaint"),
    [
        ("paper-16", "bandwidth", "0", "nic_gb_per_s"),
        ("paper-16", "capacity", "inf", "'inf' is not a number"),
        ("paper-16-ssd", "capacity", "0", "only prefill machines with store_tokens"),
        ("paper-16", "load", "0", "never ends"),
        ("paper-16", "nodes", "8:8", "--vary nodes --values 8:8: '8:8' is not a number"),
        ("vllm-16", "split", "3:3", "vllm-16 has no prefill machines"),
        ("vllm-16", "ssd", "3e6", "vllm-16 has no prefill machines"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_reason(
    trace: Path, preset: str, vary: str, value: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        app(["sweep", str(trace), "--preset", preset, "--vary", vary, "--values", value], standalone_mode=False)


def test_a_value_that_makes_no_sense_is_refused_before_any_is_played(trace: Path) -> None:
    for vary, values in (("policy", "random,nobody"), ("load", "1,0"), ("ssd", "0,1")):
        arguments = ["sweep", str(trace), "--preset", "paper-16", "--vary", vary, "--values", values, "--json"]
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ConfigError) and not result.stdout


def test_a_page_tells_a_trace_s_name_as_it_is(trace: Path, tmp_path: Path) -> None:
    odd, plot = trace.rename(tmp_path / "<b>&.jsonl.xz"), tmp_path / "plot.html"
    call("sweep", odd, "--preset", "paper-16", "--limit", "5", "--vary", "load", "--values", "1", "--plot", plot)
    assert "<h1>load on &lt;b&gt;&amp;.jsonl.xz</h1>" in plot.read_text()


def test_a_window_without_answers_shows_neither_times_nor_hits() -> None:
    pause_ms = 600_000.0
    trace = [*generate("conversation", 20, 1)]
    trace += [replace(request, timestamp_ms=request.timestamp_ms + pause_ms) for request in trace]
    simulation = Simulation(load_preset("paper-16"), trace, Run(jitter_s=0.0))
    simulation.run()
    windows = over_time(simulation)
    assert min(windows["ttft"].y) > 0.0
    assert len(windows["ttft"].y) < len(windows["sent"].y)


@pytest.mark.parametrize("command", [("simulate",), ("sweep", "--vary", "load", "--values", "0.2")])
def test_a_cluster_of_small_blocks_asks_for_a_scaled_trace(trace: Path, command: tuple[str, ...]) -> None:
    name, *args = command
    args = [name, str(trace), "--preset", "laptop", "--limit", "5", "--json", *args]
    with pytest.raises(ConfigError, match=r"scale it with (--tokens-per-block 16)") as refused:
        app(args, standalone_mode=False)
    hint = str(refused.value).rpartition("scale it with ")[2].split()
    assert json.loads(call(*args, *hint))["done"] == 5


def test_an_azure_trace_is_read_by_time_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.5000000,513,7\n2023-11-16 18:17:03.9799600,4808,10\n"
    )
    first, second = load_any(path)
    assert (first.timestamp_ms, first.input_length, first.output_length) == (0.0, 4808, 10)
    assert second.timestamp_ms == pytest.approx(520.04, abs=0.01)
    assert not set(first.hash_ids) & set(second.hash_ids)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.5,many,7\n")
    with pytest.raises(InvalidRequest, match=r"azure\.csv:2"):
        load_any(path)
    for row in ("2023-11-16 18:17:04.5,999999999999,7", "2023-11-16 18:17:04.5,7,-5"):
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
        with pytest.raises(InvalidRequest, match=r"azure\.csv:2: .* are no lengths"):
            load_any(path)


@pytest.mark.slow
def test_a_generated_trace_has_the_measured_shape() -> None:
    requests = generate("conversation", seed=1)
    tokens = [request.input_length for request in requests]
    assert len(requests) == 12_031
    assert sum(tokens) / len(tokens) == pytest.approx(12_035, rel=0.12)
    assert sum(request.output_length for request in requests) / len(requests) == pytest.approx(343, rel=0.08)
    for blocks, rate in ((None, 0.3664), (30_000, 0.3257), (10_000, 0.2112), (1_000, 0.0445)):
        assert expected_hits(requests, blocks).block_rate == pytest.approx(rate, abs=0.03)
    assert requests == generate("conversation", seed=1)


def test_a_written_trace_is_read_back(tmp_path: Path) -> None:
    target = tmp_path / "made.jsonl.gz"
    call("trace", "generate", target, "--shape", "toolagent", "--requests", "200", "--seed", "4")
    assert load_trace(target) == generate("toolagent", 200, 4)


def test_a_resampled_trace_has_more_users_of_the_same_kind(tmp_path: Path) -> None:
    requests = generate("conversation", 400, 2)
    more = ResampledTrace(requests, 1000, seed=7)
    times = [request.timestamp_ms for request in more]
    assert len(more) == 1000 and times == sorted(times)
    assert max(times) <= requests[-1].timestamp_ms - requests[0].timestamp_ms + 1
    # two whole copies and half of a third: nothing is shared between them
    assert len({request.hash_ids[0] for request in more}) == 3 * len({request.hash_ids[0] for request in requests})
    assert more[5] == ResampledTrace(requests, 1000, seed=7)[5]
    assert expected_hits(more).block_rate < expected_hits(requests).block_rate + 0.02


def test_traces_one_after_another_share_nothing() -> None:
    one, two = generate("conversation", 50, 1), generate("toolagent", 50, 1)
    joined = one_after_another([one, two])
    assert not {b for r in joined[:50] for b in r.hash_ids} & {b for r in joined[50:] for b in r.hash_ids}
    assert joined[50].timestamp_ms >= joined[49].timestamp_ms


def test_the_saved_page_of_reproductions_is_that_of_the_saved_results() -> None:
    folder = Path(__file__).parents[2] / "deploy" / "reproduction"
    assert (folder / "README.md").read_text() == page(folder)


def test_the_table_of_reproductions_says_what_is_compared() -> None:
    finding = Finding(
        "fig0", "Fig. 0", "a set-up", [Row("ratio", 2.0, 1.9), Row("ours", None, 12345.0)], "partly", "so"
    )
    text = markdown([finding])
    assert "| ratio | 2 | 1.9 |  |" in text and "| ours |  | 12,345 |  |" in text and "**partly**: so." in text
