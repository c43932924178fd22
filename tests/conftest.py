"""What every test may ask for: one small live cluster, started when the first test wants it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mooncake.app.local import LocalCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """For tests that only talk to a cluster and leave it as it is. One prefill, one decode, one store."""
    from live import running_cluster, small_config  # most tests need none of it

    with running_cluster(small_config()) as running:
        yield running
