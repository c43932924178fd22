"""Python's small objects in huge pages: given out, freed and given out again like others."""

import subprocess
import sys

STORY = """
from mooncake.app.sim.arenas import use_huge_pages

before = [str(number) for number in range(100_000)]
use_huge_pages()
use_huge_pages()
for _ in range(2):
    objects = [[number, str(number)] for number in range(500_000)]  # more than one region of memory
    assert all(text == str(number) for number, text in objects[::997])
    del objects
assert before[-1] == "99999"
del before
objects = {number: str(number) for number in range(200_000)}
assert objects[77] == "77"
"""


def test_objects_live_and_die_in_huge_pages_as_elsewhere() -> None:
    done = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
