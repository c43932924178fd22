"""What ``mooncake bench engine`` can be asked to measure: its flags, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mooncake.app.cli.flags import Flags, names, numbers
from mooncake.engine.contract import EngineConfig
from mooncake.errors import ConfigError
from mooncake.in_process.engine_args import CHUNK_TOKENS
from mooncake.precision import DTYPES, KV_DTYPES, WEIGHTS, Precision, resolve_precision

PEERS = ("transformers", "vllm", "llama.cpp")
ALSO = ("stored", "stored_a8", "int8", "w8a8")
MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    dtype: str  # also of the peers
    precision: Precision
    threads: int
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    long_tokens: int  # length of the prompt that is repeated to hit the prefix cache
    reps: int
    chunk_tokens: int
    also: tuple[str, ...]  # other weights to measure our engine with
    against: tuple[str, ...]
    vllm_python: str
    vllm_dtype: str
    llama_python: str
    peer_model: str
    seed: int
    json: Path | None

    @property
    def config(self) -> dict[str, object]:
        """Everything that affects the results, without paths."""
        return {
            "model": Path(self.model).name,
            "dtype": self.dtype,
            "kv_dtype": self.precision.kv_dtype,
            "weights": self.precision.weights.coding or self.dtype,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "long_tokens": self.long_tokens,
            "reps": self.reps,
            "chunk_tokens": self.chunk_tokens,
            "also": list(self.also),
            "against": list(self.against),
            "vllm_dtype": self.vllm_dtype if "vllm" in self.against else "",
        }


def parse(args: list[str], about: str | None = None) -> Options:
    """``about`` begins the text of ``--help``. Raises ConfigError."""
    given = _flags(about).read(args)
    if given.quick:
        given.batch, given.prompt, given.new, given.long, given.reps = "1,8", 64, 8, 512, 1
    against = names("--against", given.against.replace("vllm-cpu", "vllm"), PEERS, may_be_none=True)
    also = names("--also", given.also, ALSO, may_be_none=True)
    if "vllm" in against and not given.vllm_python:
        raise ConfigError("--against vllm needs --vllm-python: the interpreter of an environment that has vLLM")
    if "llama.cpp" in against and not given.llama_python:
        raise ConfigError("--against llama.cpp needs --llama-python: one that has llama-cpp-python")
    if given.new < 1:
        raise ConfigError("--new must be at least 1")
    longest = max(given.long, given.prompt) + given.new + 1
    if min(given.long, given.prompt) < 1 or longest > MAX_MODEL_LEN:
        raise ConfigError(f"prompt and answer must have 2 to {MAX_MODEL_LEN} tokens")
    precision = resolve_precision(given.dtype, given.kv_dtype, given.weights)
    return Options(
        model=given.model,
        dtype=precision.weights.dtype,
        precision=precision,
        threads=given.threads or torch.get_num_threads(),
        batches=numbers("--batch", given.batch, 1, EngineConfig().max_sequences),
        prompt_tokens=given.prompt,
        new_tokens=given.new,
        long_tokens=given.long,
        reps=given.reps,
        chunk_tokens=given.chunk_tokens,
        also=also,
        against=against,
        vllm_python=given.vllm_python,
        vllm_dtype=given.vllm_dtype or precision.weights.dtype,
        llama_python=given.llama_python,
        peer_model=given.peer_model,
        seed=given.seed,
        json=given.json,
    )


def _flags(about: str | None) -> Flags:
    flags = Flags("bench engine", about)
    add = flags.add
    flags.model()
    add(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="type of weights; auto: what the processor multiplies natively",
    )
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="type of our cache; auto: as --dtype")
    add(
        "--weights",
        choices=WEIGHTS,
        default="plain",
        help="our weights, if not as --dtype; stored: keep codes",
    )
    flags.threads()
    add("--batch", default="1,8,32", help="batch sizes, comma-separated")
    add("--prompt", type=int, default=256, metavar="TOKENS", help="length of each prompt")
    add("--new", type=int, default=32, metavar="TOKENS", help="tokens to generate for the decode rate")
    add(
        "--long",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="length of the prompt that is repeated to hit the prefix cache",
    )
    flags.reps(3)
    add(
        "--chunk-tokens",
        type=int,
        default=CHUNK_TOKENS,
        help="our engine's prompt tokens per step; 0: whole prompts",
    )
    add("--also", default="", help=f"our engine again with other weights, comma-separated: {', '.join(ALSO)}")
    add("--against", default="", help=f"other engines, comma-separated: {', '.join(PEERS)}")
    flags.vllm_python("the interpreter of an environment that has vLLM")
    add("--vllm-dtype", default="", help="vLLM's dtype, if not --dtype")
    flags.llama_python("the interpreter of an environment that has llama-cpp-python")
    flags.peer_model()
    flags.seed()
    flags.quick("a minute instead of ten: batch 1 and 8, one repetition, short prompts")
    flags.json_file()
    return flags
