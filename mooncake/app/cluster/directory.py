"""Opens the configured directory, in which conductors store what they know about nodes and blocks."""

from __future__ import annotations

from kvstore.metadata.memory import MemoryDirectory
from mooncake.app.extras import require
from mooncake.config import Config
from mooncake.directory import Directory


def open_directory(config: Config, kv_fingerprint: str) -> Directory:
    """Call it on the event loop that uses the directory. Raises ConfigError; MissingDependency without redis-py.

    Conductors share entries only with the same KV fingerprint: model, dtype and block size.
    """
    section = config.directory
    if not section.redis:
        return MemoryDirectory()
    require("redis", "redis", "directory.redis")
    from kvstore.metadata.redis import RedisDirectory

    return RedisDirectory(section.redis, f"mooncake:{kv_fingerprint}", section.ttl_s, section.timeout_s)
