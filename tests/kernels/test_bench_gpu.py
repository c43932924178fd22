"""``mooncake bench gpu`` itself, at tiny shapes in Triton's interpreter: it must be ready when a GPU is."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from mooncake.app.bench import gpu as bench_gpu
from mooncake.app.bench.gpu import PartResult
from mooncake.app.bench.gpu_parts.device import DECODE, OTHERS, PREFILL, Gpu, Scale, check, state
from mooncake.app.bench.report import Report
from mooncake.errors import ConfigError
from mooncake.kernels.gpu.attention import PREFILL_ROWS, attention_launch
from mooncake.kernels.gpu.triton_launch import DoesNotFit


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_and_every_target_has_its_ratio_and_its_prediction(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run = subprocess.run(
        [sys.executable, "-m", "mooncake.app.bench.gpu", "--tiny", "--out", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(file.read_text())
    assert report["config"]["gpu"] == "none (interpreter)"
    assert any("no time here means anything" in note for note in report["notes"])
    assert set(bench_gpu.TARGETS) <= set(report["ratios"])
    assert set(bench_gpu.TARGETS) == set(bench_gpu.PREDICTED)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_another_run_keeps_what_it_does_not_measure_anew(tmp_path: Path) -> None:
    """Parts that failed or were measured with other code are kept in the file until they are run again."""
    file = tmp_path / "gpu.json"

    def run(*flags: str) -> dict[str, dict[str, object]]:
        subprocess.run(
            [sys.executable, "-m", "mooncake.app.bench.gpu", "--tiny", "--out", file, "--only", "elementwise", *flags],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=100,
            check=True,
        )
        parts: dict[str, dict[str, object]] = json.loads(file.read_text())["parts"]
        return parts

    first = run()
    assert set(first) == {"limits", "elementwise"}
    saved = json.loads(file.read_text())
    ours = saved["parts"]["elementwise"]
    saved["parts"]["limits"]["took_s"] = 1234.0  # told by that: not run again
    saved["parts"]["hand-off"] = ours | {"code": "another", "ratios": {"prefill_streaming_vs_alone": 1.5}}
    saved["parts"]["elementwise"] = ours | {"failure": "exit status 1", "figures": []}
    file.write_text(json.dumps(saved))
    second = run("--resume")
    assert second["limits"]["took_s"] == 1234.0
    assert second["elementwise"]["figures"] and not second["elementwise"]["failure"]
    report = json.loads(file.read_text())
    assert report["ratios"]["prefill_streaming_vs_alone"] == 1.5
    assert report["notes"].count("measured with other code or on another GPU: hand-off") == 1


@pytest.mark.slow
def test_what_another_gpu_has_measured_is_measured_again(tmp_path: Path) -> None:
    """Its limits are no limits here."""
    file = tmp_path / "gpu.json"
    figure = {"subject": "limit", "name": "read stream", "unit": "GB/s", "values": [4300.0], "more_is_better": True}
    found = {"figures": [figure], "ratios": {"a": 0.9}, "code": bench_gpu.code()}
    for gpu, is_run in ((bench_gpu.gpu_name(), False), ("another", True)):
        file.write_text(json.dumps({"parts": {name: found | {"gpu": gpu} for name in ("limits", "unknown")}}))
        run = bench_gpu._Run(argparse.Namespace(resume=True, out=file, tiny=True, reps=1))
        run.run(bench_gpu.Part("unknown", 60, "no:module"), 60)
        part = json.loads(file.read_text())["parts"]["unknown"]
        assert bool(part.get("failure")) == is_run
    assert part["gpu"] == "another" and part["ratios"] == {"a": 0.9}, "it found nothing here: that is kept"
    assert "measured with other code or on another GPU: unknown" in run.report().notes


def test_a_part_that_finds_nothing_leaves_what_was_found_before_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    figure = {"subject": "limit", "name": "read stream", "unit": "GB/s", "values": [4300.0], "more_is_better": True}
    found = {"figures": [figure], "ratios": {"a": 0.9}, "code": "another"}
    file.write_text(json.dumps({"parts": {"limits": found, "unknown": found}}))
    run = bench_gpu._Run(argparse.Namespace(resume=True, out=file, tiny=True, reps=1))
    run.run(bench_gpu.Part("unknown", 60, "no:module"), 60)
    [limits, part] = json.loads(file.read_text())["parts"].values()
    assert part["failure"] == "exit status 1" and "ValueError" in part["output"]
    assert part["ratios"] == {"a": 0.9} and part["code"] == limits["code"] == "another"


@pytest.mark.slow
def test_without_limits_the_other_parts_run_and_say_what_they_are_compared_with(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run = bench_gpu._Run(argparse.Namespace(resume=False, out=file, tiny=True, reps=1))
    product = {"subject": "limit", "name": "matrix product", "unit": "TFLOP/s", "values": [700.0]}
    run._done[bench_gpu.LIMITS] = msgspec.convert({"figures": [product], "failure": "exit status 1"}, PartResult)
    [elementwise] = [part for part in bench_gpu.PARTS if part.name == "elementwise"]
    run.run(elementwise, 100)
    found = json.loads(file.read_text())["parts"]["elementwise"]
    assert found["figures"] and not found["failure"]
    assert found["notes"] == ["elementwise: compared with reads of 4,800 GB/s, an H200's by its data sheet"]


def test_an_output_that_is_no_number_fails_a_part_and_its_results_can_be_read() -> None:
    report = Report("gpu", {}, seed=0)
    for value in (float("nan"), float("inf")):
        with pytest.raises(AssertionError, match="wrong by"):
            check(report, "attention", torch.tensor([value, 1.0]), torch.ones(2), 0.02)
    check(report, "norm", torch.ones(2), torch.ones(2), 0.02)
    encoded = msgspec.json.encode(PartResult(ratios=report.ratios))
    assert msgspec.json.decode(encoded, type=PartResult).ratios == {"norm_error": 0.0}


@pytest.mark.slow
def test_what_is_tried_is_kept_at_once_as_a_crash_leaves_no_time_for_it(tmp_path: Path) -> None:
    """A process that waits in the driver for a kernel that never ends hears no signal but the last."""
    found = tmp_path / "part.json"
    crashing = (
        "import os, sys, types, torch\n"
        "from pathlib import Path\n"
        "from mooncake.app.bench import gpu as bench\n"
        "from mooncake.app.bench.gpu_parts.device import rate\n"
        "def work(gpu, report, _):\n"
        "    with gpu.trying('a kernel'):\n"
        "        report.add(rate('ours', 'a kernel', 'GB/s', 1.0, [0.5]))\n"
        "    with gpu.trying('a wrong one'):\n"
        "        raise AssertionError('wrong by 0.5\\nand how')\n"
        "    os._exit(139)\n"
        "sys.modules['mooncake.app.bench.gpu_parts.crashing'] = types.SimpleNamespace(work=work)\n"
        "bench.PARTS = (bench.Part('crashing', 60, 'crashing:work'),)\n"
        "bench.run_part('crashing', True, 1, 1e12, {}, Path(sys.argv[1]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", crashing, found],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(bench_gpu.ROOT)},
        timeout=60,
        check=False,
    )
    assert run.returncode == 139
    result = msgspec.json.decode(found.read_bytes(), type=PartResult)
    assert [figure.name for figure in result.figures] == ["a kernel"]
    result.failure = "exit status 139"
    assert result.reason == "exit status 139: AssertionError: wrong by 0.5"
    [what, told] = result.failures.popitem()
    result.failures[what] = "ost recent call last):\n" + told.partition("\n")[2]  # a long one
    assert result.reason == "exit status 139: AssertionError: wrong by 0.5"


def test_a_process_that_the_driver_holds_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(subprocess.Popen[bytes]):
        """Ends no sooner than the driver lets go of it."""

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "waits for ever"
            raise subprocess.TimeoutExpired("held", timeout)

    monkeypatch.setattr(bench_gpu, "END_S", 0.1)
    process = Held(["sleep", "99"], start_new_session=True)
    bench_gpu._end(process)
    assert subprocess.Popen.wait(process, 10) in (-signal.SIGINT, -signal.SIGKILL)


def test_a_run_that_is_told_to_end_ends_its_part(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    part = ["sh", "-c", f"exec sleep 99 > {alive}"]
    call = f"gpu._failure({part}, 60.0, pathlib.Path('{tmp_path}/out'))"
    program = f"import pathlib; from mooncake.app.bench import gpu; {call}"
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    with alive.open() as held:  # once the part runs
        run.terminate()
        assert held.read() == "", "the part runs on"
    assert b"KeyboardInterrupt" in run.communicate(timeout=30)[1]


def test_what_fails_is_told_and_the_fastest_launch_is_kept_for_what_follows() -> None:
    gpu, report = Gpu(Scale(tiny=False), reps=1), Report("gpu", {}, seed=0)
    usual = attention_launch(PREFILL_ROWS, 128, 64, wide=False, scaled=False)
    times = dict.fromkeys(OTHERS[PREFILL], 0.9) | {usual: 1.0, OTHERS[PREFILL][0]: 0.5}
    assert gpu.tuned(report, PREFILL, lambda: (times[gpu.launches[PREFILL]],)) == (0.5,)
    assert len(report.figures) == len(times)
    assert gpu.kernels.choose_launch(PREFILL_ROWS, 128, 64, False, False) == OTHERS[PREFILL][0]
    for other in ((PREFILL_ROWS, 128, 64, True, False), (PREFILL_ROWS, 128, 16, False, False)):
        assert gpu.kernels.choose_launch(*other) == attention_launch(*other), "of another shape"

    def timed() -> tuple[float, ...]:
        launch = gpu.launches[DECODE]
        if launch == OTHERS[DECODE][0]:
            raise DoesNotFit(300_000, 232_448, "shared memory")
        if launch == OTHERS[DECODE][1]:
            raise RuntimeError("misaligned")
        return (0.99,) if launch in OTHERS[DECODE] else (1.0,)

    assert gpu.tuned(report, DECODE, timed) == (1.0,), "within what two runs of one launch differ by"
    [(what, told)] = gpu.failures.items()
    assert str(OTHERS[DECODE][1]) in what and "RuntimeError: misaligned" in told
    assert not gpu.missing, "nobody had asked for another launch"
    with gpu.trying("all the rest"):
        raise AssertionError("wrong by 0.5")
    assert gpu.missing == ["all the rest"]


def test_the_state_is_that_of_the_gpu_that_is_measured_whatever_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES gives them other numbers, which the driver's tool does not know."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$3"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: argparse.Namespace(uuid=f"11-{device}"))
    assert state()["driver_version"] == "--id=GPU-11-3"


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    file.write_text("not JSON")
    monkeypatch.setattr(bench_gpu, "_check", lambda tiny: None)  # of a GPU
    with pytest.raises(ConfigError, match=r"gpu\.json does not hold a run of this benchmark"):
        bench_gpu.main(["--resume", "--out", str(file)])
    with pytest.raises(ConfigError, match=r"cannot write .*gone/gpu\.json"):
        bench_gpu.main(["--out", str(tmp_path / "gone" / "gpu.json")])


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_interrupted_and_keeps_what_it_had_found(tmp_path: Path) -> None:
    found, alive, ignoring, part = (tmp_path / name for name in ("found", "alive", "ignoring.py", "part.py"))
    os.mkfifo(alive)
    ignoring.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "kept = open(sys.argv[1], 'w')\n"
        "print(flush=True)\n"
        "time.sleep(99)\n"
    )
    part.write_text(
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, {str(ignoring)!r}, {str(alive)!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "try:\n"
        "    time.sleep(99)\n"
        "finally:\n"
        f"    pathlib.Path({str(found)!r}).write_text('what was measured')\n"
    )
    with os.fdopen(os.open(alive, os.O_RDONLY | os.O_NONBLOCK)) as held:
        assert bench_gpu._failure([sys.executable, str(part)], 10.0, tmp_path / "output") == "not done after 10 s"
        assert found.read_text() == "what was measured"
        os.set_blocking(held.fileno(), True)
        assert held.read() == "", "what it had started runs on"


def test_a_fault_of_the_gpu_fails_one_test_and_not_those_that_its_process_would_have_taken(tmp_path: Path) -> None:
    """What is called torch here only says that there is a GPU, and that it has failed."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "available = {'is_available': lambda: True, 'is_initialized': lambda: True, 'synchronize': lambda: None}\n"
        "cuda = SimpleNamespace(**available)\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import importlib.util, sys\n"
        f"sys.path.append({str(bench_gpu.ROOT / 'tests' / 'support')!r})\n"
        f"ours = importlib.util.spec_from_file_location('ours', {str(bench_gpu.ROOT / 'tests' / 'conftest.py')!r})\n"
        "module = importlib.util.module_from_spec(ours)\n"
        "ours.loader.exec_module(module)\n"
        "pytest_runtest_protocol = module.pytest_runtest_protocol\n"
    )
    (tmp_path / "test_on_a_gpu.py").write_text(
        "import pytest, torch\n"
        "def fault():\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "def test_first():\n"
        "    torch.cuda.synchronize = fault\n"
        "    fault()\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_others(number):\n"
        "    torch.cuda.synchronize()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", tmp_path]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1 and " 6 passed" in run.stdout, run.stdout
    assert "test_first: CUDA error: an illegal memory access" in run.stderr + run.stdout


@pytest.mark.parametrize(("command", "status"), [(["mooncake", "bench", "gpu"], 2), (["mooncake.app.bench.gpu"], 1)])
def test_without_a_gpu_it_says_so_in_one_sentence(command: list[str], status: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *command]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == status
    assert "no GPU that torch can use" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_what_a_machine_without_packages_gets_is_all_that_the_benchmark_imports() -> None:
    makefile = (bench_gpu.ROOT / "Makefile").read_text()
    [given] = re.findall(r"^GPU_NEEDS \?= ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    there = _with_what_they_need("torch", "triton", "transformers", "pytest") | set(given.replace("\\", "").split())
    modules = {part.work.partition(":")[0] for part in bench_gpu.PARTS if part.work} | {"handoff"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            IMPORT,
            *(f"mooncake.app.bench.gpu_parts.{module}" for module in modules),
            "mooncake.app.cluster.local",
            "conductor.node",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(bench_gpu.ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    sources = [Path(file).read_text() for file in run.stdout.splitlines()]
    owners = packages_distributions()
    for name in {name for source in sources for name in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)}:
        needed = {_normal(owner) for owner in owners.get(name, [])}
        ours = (bench_gpu.ROOT / name).exists()
        assert ours or not needed or needed & there, f"GPU_NEEDS lacks {needed}, which has {name}"


IMPORT = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
ours = sys.modules["mooncake"].__path__[0].removesuffix("mooncake")
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith(ours) and "/.venv/" not in file:
        print(file)
"""


def _with_what_they_need(*names: str) -> set[str]:
    found, left = set[str](), list(names)
    while left:
        name = _normal(left.pop())
        if name not in found:
            found.add(name)
            with contextlib.suppress(PackageNotFoundError):  # what another system or Python needs
                given = [each for each in requires(name) or [] if "extra ==" not in each]
                left += [re.split(r"[^\w.-]", each)[0] for each in given]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
