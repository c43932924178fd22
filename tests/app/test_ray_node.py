"""The body of an actor, in a process of its own without Ray: it ends where a role's process does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from live import small_config
from tiny_model import write_tiny_model

ACTOR = textwrap.dedent(
    """
    import sys, threading
    from mooncake.app.cluster.ray_node import RayNode

    class Stillborn(threading.Thread):
        def _bootstrap_inner(self):  # of what comes first
            raise MemoryError

    def short_of_memory():
        raise MemoryError

    node = RayNode("conductor", sys.argv[1].encode(), "ERROR")
    assert not node.failure(), node.failure()
    print("watched" if "loop watch" in {thread.name for thread in threading.enumerate()} else "alone", flush=True)
    work = {"callback": short_of_memory, "stillborn": lambda: Stillborn(daemon=True).start()}[sys.argv[2]]
    node._loop.call_soon_threadsafe(work)
    threading.Event().wait()
    """
)


@pytest.mark.parametrize(
    ("mode", "settings", "is_watched"),
    [("callback", (), "watched"), ("stillborn", ("node.step_timeout_s=0",), "alone")],
)
def test_an_actor_that_has_lost_a_part_of_itself_ends_for_ray_to_start_it_again(
    mode: str, settings: tuple[str, ...], is_watched: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    config = small_config(f"model.path={tmp_path}", "node.id=conductor", *settings)
    command = [sys.executable, "-c", ACTOR, msgspec.json.encode(config).decode(), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, f"{is_watched}\n"), done.stderr
    last_words = "no memory was left for something that nothing else makes up for; ending the process"
    assert done.stderr.splitlines()[-1] == last_words
