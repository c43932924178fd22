"""Fixtures of models as files; their ranks are forked."""

from __future__ import annotations

from pathlib import Path

import pytest
from converted import cache_for_weights
from forked_ranks import forked_ranks

__all__ = ["forked_ranks"]


@pytest.fixture
def own_weights_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised weights are kept with the test's files; compiled kernels stay where they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_for_weights(tmp_path)))
