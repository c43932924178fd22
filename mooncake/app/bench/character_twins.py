"""Small models for ``mooncake bench character`` that differ only in the KV of their layers, trained in the same way.

All have one KV head (MQA), a byte vocabulary and the architecture of Llama. They are trained in plain torch on the same
batches in the same order, and written as folders that can be served. Each window of text has a needle: four letters,
which marker tokens ask for later. It must not know how models are served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional

Ids = npt.NDArray[np.int64]

EVERY = 6  # one layer in so many has full attention, as in Character.AI's models and Gemma 3
NUM_SLOTS = 4  # letters of a needle
NUM_LETTERS = 26  # with one token per letter and slot
LETTERS = tuple(f"<|{slot}: {chr(97 + letter)}|>" for slot in range(NUM_SLOTS) for letter in range(NUM_LETTERS))
MARKERS = tuple(f"<|{slot}?|>" for slot in range(NUM_SLOTS))
QUESTION_TOKENS = 2 * NUM_SLOTS  # each marker followed by its answer
QUESTIONS = 3  # per training window, near and far
SHORT = 4  # the first half of the training has windows shorter by this factor, and as many more of them
ANSWER_WEIGHT = 4.0  # weight of an answer's loss, relative to a byte of text: answers are rare
THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """``window``: bytes that a local layer sees, including the current one; ``length``: bytes per training window."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    window: int
    length: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def short(self) -> int:
        """Window length in the first half of the training: retrieval is learnt much sooner on short windows."""
        return max(self.length // SHORT, NUM_SLOTS + (QUESTIONS + 1) * QUESTION_TOKENS)

    @property
    def reach(self) -> int:
        """How far back a byte can have an effect if every layer is local."""
        return self.layers * (self.window - 1)


@dataclass(frozen=True, slots=True)
class Training:
    steps: int
    batch: int
    rate: float
    seed: int
    dtype: str  # of matrix products: "bfloat16" if the processor has them


@dataclass(frozen=True, slots=True)
class Twin:
    """Per layer, its window (0: none), and the layer whose KV it attends to."""

    windows: tuple[int, ...]
    sources: tuple[int, ...]


def twins(shape: Shape) -> dict[str, Twin]:
    """The models by name; ``full`` is the baseline."""
    layers = range(shape.layers)
    everything, own = (0,) * shape.layers, tuple(layers)
    hybrid = tuple(0 if (layer + 1) % EVERY == 0 else shape.window for layer in layers)
    return {
        "full": Twin(everything, own),
        "sharing": Twin(everything, tuple(layer - layer % 2 for layer in layers)),
        "hybrid": Twin(hybrid, own),
        "character": Twin(hybrid, shared_in_twos(hybrid)),
        "local": Twin((shape.window,) * shape.layers, own),
    }


def shared_in_twos(windows: tuple[int, ...]) -> tuple[int, ...]:
    """Every second layer of each kind attends to the KV of the previous layer of its kind: local layers share with
    their neighbours, global ones with the previous global one."""
    open_owner: dict[int, int] = {}
    sources = []
    for layer, window in enumerate(windows):
        owner = open_owner.pop(window, None)
        if owner is None:
            open_owner[window] = owner = layer
        sources.append(owner)
    return tuple(sources)


# The text


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then the tokens of needles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in LETTERS + MARKERS])
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as ids, one token per byte. ``letters`` ``[slots, 26]`` and ``markers`` ``[slots]`` are ids too."""

    training: Ids
    validation: Ids
    letters: Ids
    markers: Ids

    @classmethod
    def of(cls, text: str) -> Corpus:
        """The last tenth is for validation."""
        tokenizer = byte_tokenizer()
        ids = np.array(tokenizer.encode(text).ids, np.int64)
        letters, markers = (np.array([tokenizer.token_to_id(name) for name in names]) for names in (LETTERS, MARKERS))
        cut = len(ids) * 9 // 10
        return cls(ids[:cut], ids[cut:], letters.reshape(NUM_SLOTS, -1), markers)

    def needle(self, random: np.random.Generator) -> Ids:
        """A random letter for each slot, ``[slots]``."""
        return self.letters[np.arange(NUM_SLOTS), random.integers(NUM_LETTERS, size=NUM_SLOTS)]

    def with_needle(self, text: Ids, needle: Ids, places: Ids) -> Ids:
        """``text`` with the needle at the first of ``places``, and questions with answers at the others and the end."""
        question = np.stack([self.markers, needle], axis=1).ravel()
        first, *others = np.split(text, np.sort(places))
        return np.concatenate([first, needle, *(part for text in others for part in (text, question))])

    def batches(self, shape: Shape, how: Training) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each step: ids ``[windows, length]``, and loss weights ``[windows, length - 1]`` of all tokens but the
        first."""
        random = np.random.default_rng(how.seed)
        for step in range(how.steps):
            is_short = step < how.steps // 2
            size, length = (SHORT * how.batch, shape.short) if is_short else (how.batch, shape.length)
            plain, rows = length - NUM_SLOTS - QUESTIONS * QUESTION_TOKENS, []
            for start in random.integers(0, len(self.training) - plain, size):
                text, places = self.training[start : start + plain], random.integers(0, plain + 1, QUESTIONS)
                rows.append(self.with_needle(text, self.needle(random), places))
            ids = np.stack(rows)
            weights = np.where(np.isin(ids[:, :-1], self.markers), ANSWER_WEIGHT, 1.0)
            yield torch.from_numpy(ids), torch.from_numpy(weights).float()


# The model


class _Attention(nn.Module):
    def __init__(self, shape: Shape, window: int, owns_kv: bool) -> None:
        super().__init__()
        self._shape, self._window = shape, window
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        if owns_kv:
            self.k_proj = nn.Linear(shape.hidden, shape.head_dim, bias=False)
            self.v_proj = nn.Linear(shape.hidden, shape.head_dim, bias=False)

    def keys_and_values(self, inputs: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, 1, T, D]`` each."""
        return turn(self.k_proj(inputs)[:, None]), self.v_proj(inputs)[:, None]

    def forward(self, inputs: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], turn: Turn) -> torch.Tensor:
        size, length, _ = inputs.shape
        query = turn(self.q_proj(inputs).view(size, length, self._shape.heads, -1).transpose(1, 2))
        key, value = (part.expand(query.shape) for part in kv)
        if self._window:
            at = torch.arange(length)
            distance = at[:, None] - at
            seen = (distance >= 0) & (distance < self._window)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return output


class _Layer(nn.Module):
    def __init__(self, shape: Shape, window: int, owns_kv: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, 1e-6)
        self.self_attn = _Attention(shape, window, owns_kv)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, 1e-6)
        self.mlp = _Mlp(shape)


Turn = Callable[[torch.Tensor], torch.Tensor]


class _Decoder(nn.Module):
    def __init__(self, shape: Shape, twin: Twin, vocab: int) -> None:
        super().__init__()
        self._sources = twin.sources
        self.embed_tokens = nn.Embedding(vocab, shape.hidden)
        self.layers = nn.ModuleList(
            _Layer(shape, window, source == layer)
            for layer, (window, source) in enumerate(zip(twin.windows, twin.sources, strict=True))
        )
        self.norm = nn.RMSNorm(shape.hidden, 1e-6)

    def forward(self, ids: torch.Tensor, turn: Turn) -> torch.Tensor:
        """The normalised output of the last layer: ``[B, T, hidden]``."""
        hidden: torch.Tensor = self.embed_tokens(ids)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, (layer, source) in enumerate(zip(self.layers, self._sources, strict=True)):
            assert isinstance(layer, _Layer)
            inputs = layer.input_layernorm(hidden)
            if source == number:
                kept[number] = layer.self_attn.keys_and_values(inputs, turn)
            hidden = hidden + layer.self_attn(inputs, kept[source], turn)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        output: torch.Tensor = self.norm(hidden)
        return output


class TwinModel(nn.Module):
    """A model whose parameters are named as in published Llama checkpoints."""

    def __init__(self, shape: Shape, twin: Twin, vocab: int) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self.model = _Decoder(shape, twin, vocab)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # large enough that attention distinguishes tokens from the first step on
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # outputs to the residual stream (GPT-2)
                parameter.data /= math.sqrt(2 * shape.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, V]``."""
        halves = torch.arange(0, self._head_dim, 2) / self._head_dim
        angles = torch.arange(ids.shape[1])[:, None] / THETA**halves
        cos, sin = angles.cos(), angles.sin()

        def turn(heads: torch.Tensor) -> torch.Tensor:
            low, high = heads.chunk(2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        return functional.linear(self.model(ids, turn), self.model.embed_tokens.weight)


# Training


def train(
    shape: Shape, twin: Twin, corpus: Corpus, how: Training, tell: Callable[[int, float], None]
) -> dict[str, torch.Tensor]:
    """Train a model and return its weights. All twins see the same batches; ``tell`` is called with the step and its
    loss over text and needles."""
    torch.manual_seed(how.seed)
    vocab = int(corpus.markers.max()) + 1
    model = TwinModel(shape, twin, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), how.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warm = max(how.steps // 20, 1)

    def rate_at(step: int) -> float:
        """Linear warm-up in the first twentieth, then cosine decay to a twentieth."""
        progress = (step - warm) / max(how.steps - warm, 1)
        return (step + 1) / warm if step < warm else 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    for step, (ids, weights) in enumerate(corpus.batches(shape, how)):
        with torch.autocast("cpu", torch.bfloat16, enabled=how.dtype == "bfloat16"):
            logits = model(ids[:, :-1])
        losses = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tell(step, float(loss.detach()))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write(folder: Path, shape: Shape, twin: Twin, weights: dict[str, torch.Tensor]) -> None:
    """Write a Hugging Face folder. The configuration comes last: a folder without it is incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kinds = ["sliding_attention" if window else "full_attention" for window in twin.windows]
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8 * shape.length,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "layer_types": kinds,
        "sliding_window": shape.window,
        "kv_source_layers": list(twin.sources),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def description(shape: Shape, twin: Twin, how: Training, text_digest: str) -> dict[str, object]:
    """Everything that determines the result of a training."""
    return {"shape": asdict(shape), "twin": asdict(twin), "training": asdict(how), "text": text_digest}
