"""Available memory of a machine and its containers; file cache that the kernel can drop does not count as used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.host_memory import RecentOomKills, available_bytes
from mooncake.model.pages import SharedMemory
from mooncake.types import KVLayout

GB = 10**9


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(folder: Path, group: str, available_kb: int = 20_000_000) -> tuple[Path, Path]:
    """A /proc whose process is in ``group``, and the folder for its groups."""
    write(folder / "proc" / "meminfo", f"MemTotal: 30000000 kB\nMemAvailable:  {available_kb} kB\n")
    write(folder / "proc" / "self" / "cgroup", group)
    return folder / "proc", folder / "cgroup"


def test_this_machine_tells_its_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert GB / 10 < available < 1e14


def test_a_cache_for_which_there_is_too_little_memory_is_refused_before_it_is_touched() -> None:
    """The system promises more than it has, and kills whoever takes it at its word."""
    available = available_bytes()
    assert available is not None
    layout = KVLayout(num_layers=16, num_kv_heads=8, block_tokens=64, head_dim=128, dtype="float32")
    num_blocks = available // layout.block_bytes + 64
    with pytest.raises(ConfigError, match=r"the system does not give .* GB: lower kv_gb or swap_gb \(.* GB are free\)"):
        KVCache(layout, num_blocks)
    with pytest.raises(ConfigError, match=r"GB of shared memory: .* GB are free"):
        SharedMemory.create(num_blocks * layout.block_bytes)


def test_without_groups_the_kernel_knows(tmp_path: Path) -> None:
    assert available_bytes(*machine(tmp_path, "0::/\n")) == 20_000_000 * 1024


def test_nothing_is_known_where_there_is_no_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("row", "inside"), [("0::/\n", ""), ("0::/pod/box\n", "pod/box"), ("0::/host/path\n", ""), ("0::/pod/box\n", "pod")]
)
def test_files_that_a_container_has_read_count_as_free(tmp_path: Path, row: str, inside: str) -> None:
    proc, groups = machine(tmp_path, row)
    write(groups / inside / "memory.max", f"{7 * GB}\n")
    write(groups / inside / "memory.current", f"{6 * GB}\n")
    write(
        groups / inside / "memory.stat",
        f"anon {GB}\nfile {5 * GB}\ninactive_file {4 * GB}\nactive_file {GB // 2}\nactive_file_refaults 7\n",
    )
    assert available_bytes(proc, groups) == 7 * GB - 6 * GB + 4 * GB + GB // 2


def test_the_older_kind_of_group_counts_all_below_it(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:cpu:/other\n4:memory:/box\n0::/\n")
    box = groups / "memory" / "box"
    write(box / "memory.limit_in_bytes", f"{8 * GB}\n")
    write(box / "memory.usage_in_bytes", f"{5 * GB}\n")
    write(box / "memory.stat", f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file {GB}\n")
    assert available_bytes(proc, groups) == 5 * GB


def test_the_tightest_group_decides_and_one_without_a_limit_does_not(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/pod/box\n")
    for inside, limit in (("pod/box", "max"), ("pod", f"{4 * GB}")):
        write(groups / inside / "memory.max", limit)
        write(groups / inside / "memory.current", f"{5 * GB}")
        write(groups / inside / "memory.stat", "anon 1\n")
    assert available_bytes(proc, groups) == 0, "it holds more than it may, and none of it can go"


def test_a_kill_for_lack_of_memory_explains_none_that_comes_much_later() -> None:
    count = 3  # before anybody looked
    kills = RecentOomKills(15, lambda: count)
    assert not kills.look(100)
    count += 1
    assert [kills.look(at) for at in (105, 110, 120, 125)] == [True, True, True, False]
    count += 1
    assert kills.look(500)


FREED = """
from pathlib import Path
from mooncake.host_memory import gives_back_memory

def load():
    return [b"x" * 100_000 for _ in range(1000)].pop()

def anonymous_kb():
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("RssAnon"))

before = anonymous_kb()
for way in (load, gives_back_memory(load)):
    kept = way()
    print(anonymous_kb() - before)
"""


def test_what_was_freed_while_loading_is_the_systems_again() -> None:
    """100 MB in blocks that the C library takes from its heap, below the one that is kept."""
    ended = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    freed_kb, given_back_kb = map(int, ended.stdout.split())
    assert freed_kb > 50_000, "this library gives back by itself"
    assert given_back_kb < 5_000
