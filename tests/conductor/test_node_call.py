"""The call to one node: whatever happens to it, its end arrives in the inbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conductor.dispatch.node_call import CallEnded, Inbox, NodeCall
from conductor.registry import NodeInfo
from mooncake.errors import InternalError
from mooncake.types import Role


class BrokenCall:
    """gRPC's object for a call, that fails in a way it should not."""

    async def initial_metadata(self) -> dict[str, str]:
        return {}

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        raise ValueError("nobody thought of this")
        yield


async def test_an_error_that_nobody_expected_ends_the_call_at_once(caplog: pytest.LogCaptureFixture) -> None:
    inbox, info = Inbox(4), NodeInfo("p0", Role.PREFILL, 1, "127.0.0.1:1")
    call = NodeCall(Role.PREFILL, info, BrokenCall(), inbox, asyncio.Event(), lambda: False, lambda info: None)  # type: ignore[arg-type]
    role, ended = await asyncio.wait_for(inbox.get(), 5.0)
    assert role is Role.PREFILL and isinstance(ended, CallEnded)
    assert isinstance(ended.error, InternalError) and ended.is_retryable and not ended.is_lost
    assert "nobody thought of this" in caplog.text
    call.close()
