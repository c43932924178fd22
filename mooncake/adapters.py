"""Adapters of a model (LoRA, Hu et al. 2021) as PEFT folders: their names, sizes and identities.

Torch-free: names, sizes and the digest that blocks and messages carry. ``mooncake.model.lora`` reads their weights.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from mooncake.errors import ConfigError, ModelError, NotFound, shown

if TYPE_CHECKING:
    from mooncake.types import TokenIds  # numpy, which would slow the command line's start

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_FILE_BYTES = {CONFIG_FILE: 1 << 20, WEIGHTS_FILE: 2 << 30}


class _PeftConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that change what is computed."""

    peft_type: str
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None
    alora_invocation_tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on disk. ``digest`` is its identity: equal digests mean equal weights, on every machine.

    One with an ``invocation`` is an activated LoRA (aLoRA, arXiv 2504.12397): it acts from where a prompt invokes it.
    """

    name: str  # as clients name it
    path: Path
    digest: str
    alpha: float
    is_rank_stabilised: bool
    invocation: tuple[int, ...] = ()  # tokens; empty: it acts on all of a prompt

    def scale(self, rank: int) -> float:
        """The factor on the product of its matrices of this rank (Kalajdzievski 2023 for the root)."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def start_in(self, prompt: TokenIds) -> int | None:
        """The first token that it acts on; None: it is not invoked, and the base model answers. As in PEFT, an
        activated adapter starts at the first token of the last invocation."""
        return last_occurrence(prompt, self.invocation) if self.invocation else 0


def last_occurrence(tokens: TokenIds, wanted: Sequence[int]) -> int | None:
    """Where the last occurrence of ``wanted`` in ``tokens`` begins."""
    num_places = len(tokens) - len(wanted) + 1
    if num_places < 1:
        return None
    fits = tokens[:num_places] == wanted[0]
    for offset, token in enumerate(wanted[1:], 1):
        fits &= tokens[offset : offset + num_places] == token
    places = fits.nonzero()[0]
    return int(places[-1]) if len(places) else None


def adapter_folder(path: str) -> Path:
    """``~`` is the home of this process's user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no such user


def open_adapter(name: str, path: str) -> Adapter:
    """Raises ModelError for a folder that is missing, or that contains anything but plain or activated LoRA."""
    folder = adapter_folder(path)
    try:
        for file_name, most in MAX_FILE_BYTES.items():
            found = (folder / file_name).stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe or a device may never end
                raise ModelError(f"the adapter {name}: {file_name} is not a file")
            if found.st_size > most:
                raise ModelError(f"the adapter {name}: {file_name} is larger than {most >> 20} MiB")
        text = (folder / CONFIG_FILE).read_bytes()
        config = msgspec.json.decode(text, type=_PeftConfig)
        digest = _digest_of(config.lora_alpha, config.use_rslora)
        with (folder / WEIGHTS_FILE).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"the adapter {name}: cannot read {error.filename}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"the adapter {name}: {CONFIG_FILE} is not PEFT's: {error}") from None
    unsupported = [
        what
        for what, is_there in {
            f"peft_type {config.peft_type}": config.peft_type != "LORA",
            "use_dora": config.use_dora,
            "fan_in_fan_out": config.fan_in_fan_out,
            f"bias {config.bias}": config.bias != "none",
            "modules_to_save": bool(config.modules_to_save),
            "alpha_pattern": bool(config.alpha_pattern),
            "alora_invocation_tokens without tokens": config.alora_invocation_tokens == [],
        }.items()
        if is_there
    ]
    if unsupported:
        raise ModelError(
            f"the adapter {name} uses {', '.join(unsupported)}; only plain and activated LoRA are supported"
        )
    invocation = tuple(config.alora_invocation_tokens or ())
    return Adapter(name, folder, _named(digest), config.lora_alpha, config.use_rslora, invocation)


def read_weights(adapter: Adapter) -> bytes:
    """The bytes of its weights. Raises ModelError when they are not those that its digest names: its blocks would have
    another adapter's names. A trainer may be writing them."""
    try:
        weights = (adapter.path / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise ModelError(f"the adapter {adapter.name}: cannot read {error.filename}: {error.strerror}") from None
    digest = _digest_of(adapter.alpha, adapter.is_rank_stabilised)
    digest.update(weights)
    if _named(digest) != adapter.digest:
        raise ModelError(f"the adapter {adapter.name}: {adapter.path / WEIGHTS_FILE} is changing while it is loaded")
    return weights


def _digest_of(alpha: float, is_rank_stabilised: bool) -> hashlib._Hash:
    """Of an adapter whose weights are still to be added."""
    return hashlib.sha256(b"%f|%d|" % (alpha, is_rank_stabilised))


def _named(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:32]


def open_adapters(paths: Mapping[str, str]) -> tuple[Adapter, ...]:
    """All of them, by name. Raises ModelError."""
    return tuple(open_adapter(name, path) for name, path in paths.items())


def parse_adapters(texts: Iterable[str]) -> dict[str, str]:
    """Parses ``name=path`` strings to paths by name. Raises ConfigError."""
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"model.adapters takes name=path, got {text!r}")
        if name in paths:
            raise ConfigError(f"model.adapters names {name} twice")
        paths[name] = path
    return paths


class LoadedAdapter:
    """An adapter in an engine's model, at the place by which batches refer to it.

    Whoever may still compute with it holds a reference to this; when there is none, its place is free.
    """

    __slots__ = ("__weakref__", "adapter", "place")

    def __init__(self, adapter: Adapter, place: int) -> None:
        self.adapter = adapter
        self.place = place


class AdapterTable:
    """The adapters of one engine, by digest."""

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self._taken: set[int] = set()
        self._loaded: dict[str, LoadedAdapter] = {}
        for adapter in adapters:
            if adapter.digest not in self:  # two names may have the same weights
                self.add(adapter, self.take_place())

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """In the order in which they were added: at first, that of their places."""
        return tuple(loaded.adapter for loaded in self._loaded.values())

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def get(self, digest: str) -> LoadedAdapter | None:
        """None for no adapter. Raises NotFound when it is not here."""
        if not digest:
            return None
        try:
            return self._loaded[digest]
        except KeyError:
            raise NotFound(f"the adapter {shown(digest)} is not loaded here: give every node the same files") from None

    def take_place(self) -> int:
        """The lowest one that is free."""
        place = next(place for place in itertools.count() if place not in self._taken)
        self._taken.add(place)
        return place

    def add(self, adapter: Adapter, place: int) -> None:
        """Sequences may refer to it from now on."""
        self._loaded[adapter.digest] = LoadedAdapter(adapter, place)

    def remove(self, digest: str, on_free: Callable[[int], None]) -> None:
        """No new sequence can refer to it. ``on_free`` is called with its place, on any thread, once nobody refers to
        it; the place stays taken until it is ``freed``."""
        loaded = self._loaded.pop(digest)
        weakref.finalize(loaded, on_free, loaded.place).atexit = False

    def freed(self, place: int) -> None:
        self._taken.discard(place)
