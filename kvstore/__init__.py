"""The KV pool: blocks of bytes by key over the memory and disks of many nodes. Its API is ``kvstore.Client``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client.pool import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from kvstore.client.pool import Client

        return Client
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
