"""A part of ``mooncake bench gpu``: a prompt's hand-off between two engines on one GPU, with the components of nodes.

Layers are copied from the device while the next ones are computed, sent over shared memory, verified, and copied into
the other cache. It must not know the sizes of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvstore.checksum import range_checksums
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.app.bench.report import Report
from mooncake.engine.cache.device_cache import DeviceCache, HostMirror, SettledModel
from mooncake.engine.contract import NO_HOOK, EngineConfig, StepHook, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.sampling import SamplingParams
from mooncake.types import KVLayout
from prefill_node.kv_writer import Destination, KVWriter, WriteStream
from prefill_node.streamer import LayerStreamer, StreamedPrompt

if TYPE_CHECKING:
    from mooncake.app.bench.gpu_parts.device import Gpu

EPOCH = 1
NEW_TOKENS = 3
TIMEOUT_S = 60.0


def hand_off(gpu: Gpu, report: Report, model: GpuModel, block_tokens: int) -> None:
    """Adds figures in ms. Raises AssertionError when the tokens differ from those of a single engine."""
    bench = _HandOff(gpu, model, block_tokens)
    try:
        alone = bench.prefill(NO_HOOK, "warm-up", None)
        for repetition in range(gpu.reps):
            took = {"prefill alone": _ms(lambda: bench.prefill(NO_HOOK, "alone", 1))}
            for name, took_ms in (took | bench.run(f"r{repetition}", alone)).items():
                report.add_value("ours", f"hand-off: {name}", "ms", took_ms)
    finally:
        bench.close()
    streaming, prefill = (report.find("ours", f"hand-off: prefill{how}") for how in (", layers going out", " alone"))
    report.compare("prefill_streaming_vs_alone", streaming, prefill)


class _HandOff:
    """Two caches on one GPU, each with its host mirror, and everything between them."""

    def __init__(self, gpu: Gpu, model: GpuModel, block_tokens: int) -> None:
        config = model.config
        length = gpu.scale.size(8192, 20)
        num_blocks = -(-(length + NEW_TOKENS) // block_tokens) + 1
        dtype = str(gpu.dtype).removeprefix("torch.")
        self._layout = KVLayout(config.num_layers, config.num_kv_heads, block_tokens, config.head_dim, dtype)
        self._block_tokens = block_tokens
        self._prompt = np.random.default_rng(0).integers(0, config.vocab_size, length, dtype=np.uint32)
        self._segment = Segment.create("decode", self._layout.block_bytes, num_blocks)
        caches = [DeviceCache(self._layout, num_blocks, gpu.device) for _ in range(2)]
        self._out, self._into = HostMirror(caches[0]), HostMirror(caches[1], self._segment.buffer)
        sampled = GpuModel(lambda _: model._model, num_blocks, gpu.dtype, gpu.device, buckets=())
        sampled.kernels = model.kernels  # the model follows their plan
        settings = EngineConfig(block_tokens, gpu.scale.size(2048, 16), 1, num_blocks * block_tokens, keep_events=False)
        self._prefill, self._decode = (
            Engine(SettledModel(sampled, mirror), cache, settings)
            for cache, mirror in zip(caches, (self._out, self._into), strict=True)
        )
        self._server = SegmentServer(self._segment, "decode", ("shm",))
        self._server.start()
        self._transfer = TransferEngine("prefill", ("shm",))
        self._writer = KVWriter("hand-offs", self._transfer, self._out.memory, lambda *_: None)

    def prefill(self, hook: StepHook, name: str, num_to_sample: int | None) -> list[StepOutput]:
        """Compute the prompt and ``num_to_sample`` tokens (None: all)."""
        self._prefill.add(self._sequence(name, num_to_sample))
        outputs = _run(self._prefill, hook)
        self._prefill.abort(name)
        self._prefill.drop_cached()
        return outputs

    def run(self, name: str, expected: list[StepOutput]) -> dict[str, float]:
        """One hand-off. Returns the ms of its phases."""
        reserved = self._decode.reserve(self._sequence(name, None)).block_ids
        self._server.grant(reserved, EPOCH)
        stream = WriteStream(name, self._layout, time.monotonic() + TIMEOUT_S, self._writer)
        slots = {index: (block, EPOCH) for index, block in enumerate(reserved)}
        stream.open(Destination(self._server.address, slots))
        streamer = LayerStreamer(self._block_tokens, self._out)
        streamer.prompts[name] = StreamedPrompt(_nothing_to_load, [stream], lambda *_: None, lambda: None)
        first: list[StepOutput] = []
        took = {"prefill, layers going out": _ms(lambda: first.extend(self.prefill(streamer, name, 1)))}
        took["last bytes after the first token"] = _ms(lambda: stream.done.result(TIMEOUT_S))
        self._server.revoke(reserved)
        took["verified"] = _ms(lambda: self._verify(reserved, stream))
        took["host to device"] = _ms(lambda: self._into.to_device(reserved).wait())
        self._decode.start_reserved(name, [first[0].token])
        answer = _run(self._decode, NO_HOOK)
        assert [one.token.token_id for one in answer] == [one.token.token_id for one in expected], "other tokens"
        self._decode.drop_cached()
        return took

    def close(self) -> None:
        self._writer.stop()
        self._transfer.close()
        self._server.stop()
        self._out.close()
        self._into.close()
        self._segment.close()

    def _verify(self, block_ids: list[int], stream: WriteStream) -> None:
        for index, block_id in enumerate(block_ids):
            sums = range_checksums(self._into.memory[block_id].data, self._layout.num_layers)
            assert np.array_equal(sums, stream.checksums[index]), "other bytes"

    def _sequence(self, name: str, num_to_sample: int | None) -> Sequence:
        greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        return Sequence(
            name,
            self._prompt,
            len(self._prompt),
            greedy,
            Chain(b"bench"),
            eos_ids=(),
            max_model_len=len(self._prompt) + NEW_TOKENS,
            num_to_sample=num_to_sample,
            hold_blocks=num_to_sample is not None,
        )


def _run(engine: Engine, hook: StepHook) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step(hook)
    return outputs


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _nothing_to_load(blocks: object) -> NoReturn:
    raise AssertionError("nothing is stored")
