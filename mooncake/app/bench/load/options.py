"""Options of benchmarks that put a cluster of this machine under load: what it is, and what it is asked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from mooncake.app.cli.flags import Flags, numbers
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, EngineSection, load_config, toml_value
from mooncake.errors import ConfigError

FIRST_TOKENS = 4  # of requests that measure TTFT or warm up: enough to include the hand-off
MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class LoadOptions:
    config: Config  # of the cluster, on ports of its own
    concurrency: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    long_tokens: int
    requests: int  # per client
    reps: int
    vllm_python: str
    peer_model: str
    seed: int
    json: Path | None

    def told(self) -> dict[str, object]:
        """What of it affects results, without paths."""
        config = self.config
        return {
            "model": Path(config.model.path).name,
            "dtype": config.model.dtype,
            "prefill_nodes": config.cluster.prefill,
            "decode_nodes": config.cluster.decode,
            "chunk_tokens": config.prefill.chunk_tokens,
            "block_tokens": config.block.tokens,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "long_tokens": self.long_tokens,
            "requests": self.requests,
            "reps": self.reps,
        }


def add_load_flags(flags: Flags, *, requests: int, reps: str, vllm: str, quick: str) -> None:
    """``reps``, ``vllm`` and ``quick`` are the help of flags of these names."""
    add = flags.add
    add("--config", type=Path, metavar="FILE", help="the cluster's TOML file")
    flags.overrides()
    flags.model("")  # default: the configuration's model
    add("--concurrency", default="1,8,16", help="clients at once, comma-separated")
    add("--prompt", type=int, default=256, metavar="TOKENS", help="length of prompts")
    add("--new", type=int, default=48, metavar="TOKENS", help="tokens of answers")
    add("--long", type=int, default=2048, metavar="TOKENS", help="prompt whose repeat hits the prefix cache")
    add("--requests", type=int, default=requests, help="requests per client, one after the other")
    flags.reps(3, reps)
    flags.vllm_python(vllm)
    flags.peer_model()
    flags.seed()
    flags.quick(quick)
    flags.json_file()


def load_options(given: argparse.Namespace, needed: int, what: str) -> LoadOptions:
    """``needed`` is the longest sequence that is asked for, ``what`` the flags that it follows from. Raises ModelError,
    and ConfigError, also when the model has no room for it."""
    overrides = [*given.set, *([f"model.path={toml_value(given.model)}"] if given.model else [])]
    concurrency = numbers("--concurrency", given.concurrency, 1, EngineSection().max_sequences)
    if given.requests < 1 or given.new < 2:
        raise ConfigError("--requests must be at least 1, --new at least 2")
    config = load_config(given.config, overrides)
    longest = config.model.max_model_len or min(MAX_MODEL_LEN, open_checkpoint(config.model.path).config.max_model_len)
    needed = max(given.long + FIRST_TOKENS, needed)
    if min(given.prompt, given.long) < 1 or needed > longest:
        raise ConfigError(f"{what}, or --long, would be up to {needed} tokens; there is room for 1 to {longest}")
    return LoadOptions(
        config=replace(
            config,
            model=replace(config.model, max_model_len=longest),
            conductor=replace(config.conductor, http_port=0, grpc_port=0),
        ),
        concurrency=concurrency,
        prompt_tokens=given.prompt,
        new_tokens=given.new,
        long_tokens=given.long,
        requests=given.requests,
        reps=given.reps,
        vllm_python=given.vllm_python,
        peer_model=given.peer_model,
        seed=given.seed,
        json=given.json,
    )
