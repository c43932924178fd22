"""Every role leaves by the same door: signals end it cleanly, expected errors are one sentence, no orphan survives."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import is_running

ROLE = textwrap.dedent(
    """
    import asyncio, atexit, subprocess, threading
    from mooncake.app.cluster.role_main import run_role
    from mooncake.errors import ModelError, NodeUnavailable, StaleEpoch
    from mooncake.rpc.server import CleanUps
    from mooncake.threads import Expendable
    from mooncake.vital import vital

    def short_of_memory():
        raise MemoryError

    async def go_out():
        {}["wick"]

    async def burn():
        short_of_memory()

    class Stillborn(threading.Thread):
        def _bootstrap(self):  # what a new thread does first; whoever starts it waits until it has
            short_of_memory()

    class Lamp:
        control_address = "nowhere:0"

        def __init__(self, config):
            self.mode = config.model.name

        async def start(self):
            if self.mode == "broken":
                raise ModelError("there is no model in the drawer")
            if self.mode == "dark":
                raise NodeUnavailable("the power is out")
            if self.mode in ("compiling", "blocked"):
                print("starting", flush=True)
                def compile():
                    subprocess.run(["sleep", "40"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                if self.mode == "blocked":
                    compile()
                await asyncio.to_thread(compile)
            if self.mode == "slow":
                print("starting", flush=True)
                await asyncio.sleep(600)
            if self.mode == "crowded":
                threading.stack_size(1 << 46)  # more than there is address space: no thread can be started
                await asyncio.to_thread(print, "aside", flush=True)
            print("on", flush=True)

        async def wait_fatal(self):
            loop = asyncio.get_running_loop()
            match self.mode:
                case "thread":
                    threading.Thread(target=lambda: {}["wick"], daemon=True).start()
                case "spare":
                    Expendable(target=lambda: {}["wick"], daemon=True).start()
                case "stillborn":
                    Stillborn(daemon=True).start()
                case "callback":
                    loop.call_soon(short_of_memory)
                case "task":
                    asyncio.create_task(burn())
                case "vital":
                    self.flame = vital(go_out(), "flame")  # nobody awaits it, and it is not dropped
                case "cleaning":
                    CleanUps().start(burn())
                case "slip":
                    loop.call_soon(lambda: {}["wick"])
            if self.mode != "replaced":
                atexit.register(print, "taken apart")  # what a stopped node leaves out
                await asyncio.Event().wait()
            return StaleEpoch("there is another lamp")

        async def stop(self):
            if self.mode == "stuck":
                print("stuck", flush=True)
                await asyncio.Event().wait()
            print("off", flush=True)

    run_role("lamp", Lamp)
    """
)


@contextmanager
def lamp(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ROLE, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {})
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_signal_stops_a_node_cleanly() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with lamp("--set", "node.id=lamp-7") as process:
            assert said(process) == "on"
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
            assert (process.returncode, out) == (0, "off\n")
            assert "INFO    lamp-7 mooncake.app.cluster.role_main: lamp serves on nowhere:0\n" in err


def test_a_signal_while_starting_stops_what_was_started() -> None:
    with lamp("--set", "model.name=slow") as process:
        assert said(process) == "starting"
        process.terminate()
        assert process.communicate(timeout=20)[0] == "off\n"
        assert process.returncode == 0


def test_a_signal_while_starting_does_not_wait_for_a_compiler() -> None:
    for mode, last_words in (("compiling", "off\n"), ("blocked", "")):
        with lamp("--set", f"model.name={mode}") as process:
            assert said(process) == "starting"
            process.terminate()
            assert process.communicate(timeout=20)[0] == last_words
            assert process.returncode == 0


def test_a_node_that_cannot_go_on_stops_and_ends_with_an_error() -> None:
    with lamp("--set", "model.name=replaced", "--log-level", "WARNING") as process:
        assert process.communicate(timeout=20) == ("on\noff\n", "lamp: there is another lamp\n")
        assert process.returncode == 1


def test_a_second_signal_does_not_wait() -> None:
    with lamp("--set", "model.name=stuck") as process:
        assert said(process) == "on"
        process.terminate()
        assert said(process) == "stuck"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def test_expected_errors_are_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    for arguments, code, sentence in (
        (["--set", "model.name=dark"], 1, "lamp: the power is out\n"),
        (["--set", "model.name=broken"], 2, "lamp: there is no model in the drawer\n"),
        (["--set", "model.nam=x"], 2, "lamp: unknown configuration key model.nam; did you mean model.name?\n"),
        (["--config", str(tmp_path / "no.toml")], 2, f"lamp: cannot read the configuration {tmp_path}/no.toml: "),
    ):
        with lamp(*arguments) as process:
            _, err = process.communicate(timeout=20)
            assert process.returncode == code
            assert err.startswith(sentence)
            assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_too_full_for_the_sentence_leaves_the_exit_code() -> None:
    """A service manager is told by it not to start the process again."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvstore", "--set", "model.nam=x"]
        assert subprocess.run(command, stderr=full, timeout=60, check=False).returncode == 2


def test_help_is_called_as_the_program_was() -> None:
    command = [sys.executable, "-m", "kvstore", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: python -m kvstore [-h]")


def test_a_node_does_not_outlive_its_launcher() -> None:
    launcher = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE, text=True,\n"
        "    env=os.environ | {'MOONCAKE_PARENT_PID': str(os.getpid())})\n"
        "assert child.stdout.readline() == 'on\\n'\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, ROLE], stdout=subprocess.PIPE, text=True) as process:
        child = int(said(process))
        process.kill()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline, "the node outlived its launcher"
        time.sleep(0.05)


def test_what_runs_beside_the_event_loop_runs_where_no_thread_can_be_started() -> None:
    with lamp("--set", "model.name=crowded") as process:
        assert [said(process), said(process)] == ["aside", "on"]


def test_a_node_without_file_descriptors_stops_cleanly() -> None:
    with lamp() as process:
        assert said(process) == "on"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, 0))
        process.terminate()
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "off\n")
        assert "Traceback" not in err


def test_a_node_without_file_descriptors_says_so() -> None:
    with lamp() as process:
        assert process.stderr is not None
        assert said(process) == "on"
        _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        for limit, told in (
            (0, "new connections wait, and no file can be opened: this process has as many open as it may (0)"),
            (most, "there are file descriptors again"),
        ):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, most))
            assert any(told in line for line in process.stderr)


def test_a_node_that_crashes_says_where() -> None:
    with lamp() as process:
        assert said(process) == "on"
        process.send_signal(signal.SIGABRT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in err and "role_main.py" in err


def test_a_node_without_standard_files_takes_no_other_file_for_them() -> None:
    with subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", ROLE]) as process:
        try:
            deadline = time.monotonic() + 20
            while not catches(process.pid, signal.SIGTERM):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            files = [Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in range(3)]
            assert files == [Path("/dev/null")] * 3
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("mode", "last_words"),
    [
        ("thread", "a thread has died"),
        ("stillborn", "no memory was left for something that nothing else makes up for"),
        ("callback", "no memory was left for something that nothing else makes up for"),
        ("task", "no memory was left for something that nothing else makes up for"),
        ("vital", "a vital task has died"),
        ("cleaning", "no memory was left for something that nothing else makes up for"),
    ],
)
def test_a_process_that_has_lost_a_part_of_itself_ends(mode: str, last_words: str) -> None:
    """It would live on, and what that part does would never be done; a stillborn thread stops the event loop."""
    with lamp("--set", f"model.name={mode}") as process:
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (1, "on\n")
        assert err.splitlines()[-1] == f"{last_words}; ending the process"


@pytest.mark.parametrize("mode", ["spare", "slip"])
def test_what_costs_only_its_own_work_ends_nothing(mode: str) -> None:
    with lamp("--set", f"model.name={mode}") as process:
        assert said(process) == "on"
        assert process.stderr is not None
        while "KeyError: 'wick'" not in process.stderr.readline():
            pass
        process.terminate()
        assert process.communicate(timeout=20)[0] == "off\n"
        assert process.returncode == 0
