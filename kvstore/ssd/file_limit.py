"""How many files a process may open, against how many segments an SSD's log has."""

from __future__ import annotations

import resource

from mooncake.errors import ConfigError

OTHER_FILES = 128  # beside segments, at least: connections, shared memory


def check_file_limit(capacity_bytes: int, num_segments: int) -> None:
    """Raises ConfigError when this process may not open a file for each segment, beside those for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_segments + OTHER_FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        gigabytes = f"store.ssd_gb = {capacity_bytes / 1e9:g}"
        raise ConfigError(f"{gigabytes} takes {needed} open files, and this process may open {limit} (ulimit -n)")
