"""The shape of a model, and typed look-ups in a config.json: shared by checkpoints and families. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mooncake.errors import ConfigError, ModelError

MAX_LAYERS = 1024
MAX_POSITIONS = 1 << 28
MAX_EXPERTS = 1024  # per layer; each has its own names
STATE_WINDOW = 2  # tokens: the state before the next token is in the page of the token before it
MAX_INTEGER = 1 << 53  # no number in a config.json is larger, and floats are exact up to it


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1). The keys and values of all heads are computed from
    one vector of ``rank`` elements per token; an extra key of ``rope_dim`` elements, shared by all heads, carries the
    position.

    Both are cached together as a token's only key, of ``ModelConfig.head_dim`` elements, which is also its value.
    """

    rank: int
    rope_dim: int
    nope_dim: int  # of each head's query and key: the part without positions
    value_dim: int  # of each head
    query_rank: int = 0  # queries are computed from a vector of this size; 0: from the hidden state
    turns_halves: bool = False  # of the rotating part its halves, and not neighbouring elements, turn into each other


@dataclass(frozen=True, slots=True)
class Routing:
    """Mixtures of experts like DeepSeek's (DeepSeek-V3 2024, section 2.1.2).

    ``scoring``: "softmax" or "unbiased_sigmoid"; with a bias that only affects the choice "biased_softmax" or
    "sigmoid"; "sigmoid_inputs" if scores are factors on what enters the experts (Llama 4).
    """

    dense_layers: tuple[int, ...]  # whose MLPs have no experts, and are ``ModelConfig.intermediate_size`` wide
    expert_size: int  # width of an expert
    scoring: str
    factor: float  # applied to the sum of the chosen experts
    num_groups: int = 1  # groups of experts
    top_groups: int = 1  # groups of which a token uses experts
    shared_factor: float = 1.0  # applied to the expert that every token uses

    @property
    def has_choice_bias(self) -> bool:
        return self.scoring in ("sigmoid", "biased_softmax")


@dataclass(frozen=True, slots=True)
class Streams:
    """Several residual streams (AltUp, Baykal et al. 2023), of which layers compute with the first, and LAuReL
    (Menghani et al. 2024)."""

    count: int
    low_rank: int  # of each layer's learned residual
    are_scaled: bool  # the first one, before what layers are given is added to the others
    sparsity: tuple[float, ...]  # of each layer's gates: the share of them that is zero, were they normally distributed


@dataclass(frozen=True, slots=True)
class GemmaParts:
    """What layers of Gemma 3n (Gemma team 2025) and 4 (2026) have besides those of Gemma 3."""

    input_size: int = 0  # of the embedding that each layer has of every token; 0: none
    input_vocab: int = 0  # tokens with such embeddings; others have the first one's
    has_wide_mlps: bool = False  # MLPs of layers without KV of their own are twice as wide
    keys_are_values: bool = False  # in global layers: values are keys before their norm and rotation
    expert_size: int = 0  # width of each expert of a mixture beside the MLP; 0: no mixture
    streams: Streams | None = None  # Gemma 3n


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers that keep a state of fixed size in place of KV: the last inputs of a short convolution (LFM2), and behind
    it a matrix per value head, for the gated delta rule (Qwen3-Next; Yang et al. 2024, arXiv 2412.06464) or a state
    space (``Mamba``)."""

    layers: tuple[int, ...]
    taps: int  # tokens that the convolution sees, the current one included
    channels: int  # what it sees of a token; with heads: queries, keys and values, in the order of the rule
    num_value_heads: int = 0  # a multiple of the key heads; 0: only the convolution
    value_dim: int = 0  # of each head
    num_key_heads: int = 0
    key_dim: int = 0

    @property
    def state_size(self) -> int:
        """float32 numbers of a state: the last inputs of the convolution, and a matrix per value head."""
        return (self.taps - 1) * self.channels + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.state_size


@dataclass(frozen=True, slots=True)
class Factors:
    """Falcon-H1 (TII 2025, arXiv 2507.22448, section 3.2.3): applied to what matrices give, beside those on embeddings,
    scores and logits."""

    inputs: tuple[float, ...]  # of a state space: gate, x, B, C and step
    state_space: float
    attention: float
    gate: float
    mlp: float


@dataclass(frozen=True, slots=True)
class Mamba:
    """What layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) have besides a ``Recurrence``, whose value heads are
    those of x, and whose key heads are the groups of B and C."""

    norm_groups: int  # each of which the norm behind the state space takes for itself; 0: no norm
    has_conv_bias: bool = True
    has_biases: bool = False  # of projections
    norms_first: bool = False  # and what the norm gives is gated
    pattern: str = ""  # Nemotron-H: of published layers (``families.nemotron_h``)
    latent_size: int = 0  # of what experts compute with, smaller than the hidden state; 0: that
    factors: Factors | None = None  # Falcon-H1, whose layers each have attention beside Mamba-2: here they are two


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Differences within the Llama family are fields, not code; other families' fields come
    last.

    ``rope_scaling`` is None or holds "rope_type" ("linear", "llama3", "yarn", "longrope" or "proportional") and its
    parameters, named as in config.json; of LongRoPE's two sets of divisors, ``for_context`` leaves the one in use, as
    "factors".
    """

    architecture: str  # the family, as config.json's model_type names it
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int  # tokens of prompt plus answer
    rope_theta: float
    rope_scaling: Mapping[str, object] | None
    rms_eps: float  # of either kind of norm
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None  # tokens a query sees, itself included; None: all
    bos_id: int | None
    eos_ids: tuple[int, ...]
    activation: str = "silu"  # of the MLP: silu, relu, relu2 (squared), gelu, gelu_tanh, xielu
    rotary_dim: int = -1  # elements of a head that rotate: -1 all, 0 none (learned positions)
    parallel_residual: bool = False  # GPT-NeoX: attention and MLP read the same residual
    layer_windows: tuple[int, ...] = ()  # Gemma: each layer's own ``window_of``
    local_rope_theta: float = 0.0  # Gemma 3: for layers with a window
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    num_experts: int = 0  # per layer; each expert is ``intermediate_size`` wide; 0: a dense MLP
    experts_per_token: int = 0
    norm_expert_weights: bool = False  # the chosen experts' weights sum to one
    score_cap: float = 0.0  # Gemma 2: soft cap of attention scores; 0: none
    logit_cap: float = 0.0  # and of logits
    embedding_factor: float = 1.0  # Granite: applied to embeddings,
    residual_factor: float = 1.0  # to what attention and MLP add to the residual,
    logit_divisor: float = 1.0  # and divides logits
    kv_sources: tuple[int, ...] = ()  # the layer whose KV each layer attends to: an earlier one or itself; (): itself
    shared_expert_size: int = 0  # width of the expert that every token uses
    mlp_has_norm: bool = True  # False: the MLP reads the output of attention's norm (small Falcons)
    latent: LatentAttention | None = None
    routing: Routing | None = None  # None: as in Qwen3 and Mixtral, in every layer
    query_growth: float = 0.0  # Ministral 3: queries at position p are scaled by 1 + growth * ln(1 + p // span),
    query_span: int = 0  # so that attention over long contexts stays as sharp;
    query_offset: int = 0  # Llama 4: p + this; and if some layers do not rotate, only in those
    qkv_limit: float = 0.0  # OLMo: queries, keys and values are clamped to within ± this; 0: not
    still_layers: tuple[int, ...] = ()  # SmolLM3, Command R7B: layers whose heads do not rotate (NoPE)
    # Not in ``repr``, which names KV: that of models without these is called what it was (``Checkpoint.digest``).
    layer_heads: tuple[tuple[int, int], ...] = field(default=(), repr=False)  # each layer's KV heads and head size
    gemma: GemmaParts | None = field(default=None, repr=False)
    recurrence: Recurrence | None = field(default=None, repr=False)  # layers with states: their window is STATE_WINDOW
    mamba: Mamba | None = field(default=None, repr=False)  # those layers are Mamba-2's
    alibi_slopes: tuple[float, ...] = field(default=(), repr=False)  # of each head (``families.alibi``); (): no ALiBi
    has_head: bool = field(default=True, repr=False)  # False: it is for embeddings, and gives no logits
    stacked_experts: bool = field(default=False, repr=False)  # all experts of a layer are published as one tensor

    def query_grows(self, layer: int) -> bool:
        """Whether ``query_growth`` applies to this layer."""
        return self.query_growth > 0 and (not self.still_layers or layer in self.still_layers)

    @property
    def softmax_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def kv_kinds(self) -> int:
        """Rows cached per token and head: a key and a value, or one row that is both."""
        return 1 if self.latent else 2

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """The layers that compute keys and values, in the cache's order."""
        return tuple(layer for layer in range(self.num_layers) if self.owns_kv(layer))

    def owns_kv(self, layer: int) -> bool:
        """Whether the layer computes keys and values; otherwise it only computes queries."""
        return not self.kv_sources or self.kv_sources[layer] == layer

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of the layer, and the elements of each."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    @property
    def row_heads(self) -> tuple[int, int]:
        """Heads and head size of a row of pages (``page_groups``): what the layers that keep least have, in heads of
        the smallest size. Of such heads a layer's KV takes no more bytes than of its own, larger ones, as int8 too."""
        heads = [self.heads_of(layer) for layer in self.kv_owners]
        size = min(size for _, size in heads)
        return -(-min(count * size for count, size in heads) // size), size

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """How many rows each of the cache's layers takes; the last may be used in part. Empty: one each."""
        if not self.layer_heads:
            return ()
        elements = math.prod(self.row_heads)
        rows = tuple(-(-math.prod(self.heads_of(layer)) // elements) for layer in self.kv_owners)
        return rows if max(rows) > 1 else ()

    def rows_for(self, row_bytes: int) -> tuple[int, ...]:
        """The same, for rows of so many bytes, which decides how many of them a state takes."""
        if self.recurrence is None:
            return self.kv_rows
        of_state = -(-self.recurrence.state_bytes // row_bytes)
        rows = tuple(of_state if layer in self.recurrence.layers else 1 for layer in range(self.num_layers))
        return rows if of_state > 1 else ()

    def kv_layer_of(self, layer: int) -> int:
        """The cache layer whose keys and values this layer attends to."""
        return self.kv_owners.index(self.kv_sources[layer]) if self.kv_sources else layer

    def context(self, asked: int) -> int:
        """Tokens of prompt plus answer if ``asked`` for this many (0: all the model allows). Raises ConfigError if the
        model allows fewer."""
        if asked > self.max_model_len:
            what = f"max_model_len is {asked}, and the context of the model {self.max_model_len} tokens"
            raise ConfigError(f"{what}: ask for no more, or leave it out")
        return asked or self.max_model_len

    def for_context(self, asked: int) -> ModelConfig:
        """The model as it runs with a context of ``asked`` tokens, or 0. This only changes LongRoPE.

        LongRoPE's long divisors are for contexts longer than the model was trained with, its short ones for others.
        Rotated keys stay in the cache, so one set serves every sequence: the long one only if more than the trained
        length is asked for. With 0 the context ends at the trained length (vLLM's rule). Idempotent for
        ``max_model_len``.
        """
        scaling = self.rope_scaling or {}
        if "short_factor" not in scaling:
            return self
        trained_len = scaling["original_max_position_embeddings"]
        assert isinstance(trained_len, float)
        is_long = asked > trained_len
        kept = {name: scaling[name] for name in ("rope_type", "attention_factor")}
        return replace(
            self,
            max_model_len=self.max_model_len if is_long else min(self.max_model_len, int(trained_len)),
            rope_scaling=kept | {"factors": scaling["long_factor" if is_long else "short_factor"]},
        )

    def window_of(self, layer: int) -> int:
        """Tokens that a query of the layer sees, itself included; 0: all. Negative: only those of its chunk of so many,
        as in ``reference.paged_attention``."""
        return self.layer_windows[layer] if self.layer_windows else self.sliding_window or 0

    def __post_init__(self) -> None:
        """Raises ModelError for what cannot describe a model."""
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            self._check(name, 1, 1 << 24)
        self._check("num_layers", 1, MAX_LAYERS)
        self._check("num_experts", 0, MAX_EXPERTS)
        self._check("max_model_len", 1, MAX_POSITIONS)
        self._check_heads()
        for value in (self.rope_theta, self.rms_eps):
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"rope_theta and rms_eps must be positive, got {self.rope_theta} and {self.rms_eps}")
        wrong = [i for i in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))) if not self._has_token(i)]
        if wrong:
            raise ModelError(f"the token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        self._check_kv_sources()
        self._check_recurrence()
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(f"a token cannot use {self.experts_per_token} of {self.num_experts} experts")

    def _check_heads(self) -> None:
        if self.layer_heads and len(self.layer_heads) != self.num_layers:
            raise ModelError(f"layer_heads has {len(self.layer_heads)} entries for {self.num_layers} layers")
        for num_kv_heads, head_dim in {(self.num_kv_heads, self.head_dim), *self.layer_heads}:
            if not 1 <= min(num_kv_heads, head_dim) <= max(num_kv_heads, head_dim) <= 1 << 24:
                raise ModelError(f"a layer cannot have {num_kv_heads} KV heads of {head_dim}")
            if self.num_heads % num_kv_heads:
                raise ModelError(f"{self.num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
            if head_dim % 2:
                raise ModelError(f"rotary positions need an even head size, got {head_dim}")

    def _check_recurrence(self) -> None:
        it = self.recurrence
        if it is None:
            return
        assert not (self.kv_sources or self.layer_heads or self.latent), "no family has these beside states"
        if not set(it.layers) < set(range(self.num_layers)):
            raise ModelError(f"some of {self.num_layers} layers must attend, and the others keep states")
        if not 2 <= it.taps <= 1 << 10 or not 1 <= it.channels <= 1 << 24:
            raise ModelError(f"a convolution cannot have {it.taps} taps and {it.channels} channels")
        sizes = (it.num_key_heads, it.key_dim, it.num_value_heads, it.value_dim)
        if not any(sizes):
            return
        if not 1 <= min(sizes) <= max(sizes) <= 1 << 16:
            raise ModelError(f"a state cannot have {sizes} heads and sizes of keys and values")
        if it.num_value_heads % it.num_key_heads:
            raise ModelError(f"{it.num_value_heads} value heads cannot share {it.num_key_heads} key heads evenly")
        if self.mamba and self.mamba.norm_groups and it.num_value_heads * it.value_dim % self.mamba.norm_groups:
            raise ModelError(f"{it.num_value_heads} heads cannot be normalised in {self.mamba.norm_groups} groups")

    def _check_kv_sources(self) -> None:
        if self.kv_sources and len(self.kv_sources) != self.num_layers:
            raise ModelError(f"kv_sources has {len(self.kv_sources)} entries for {self.num_layers} layers")
        for layer, source in enumerate(self.kv_sources):
            if not 0 <= source <= layer:
                raise ModelError(f"layer {layer} cannot share the KV of layer {source}: it is not an earlier one")
            if not self.owns_kv(source):
                raise ModelError(f"layer {layer} cannot share the KV of layer {source}, which has none of its own")
            if self.window_of(source) != self.window_of(layer):
                raise ModelError(f"layer {layer} cannot share the KV of layer {source}: their windows differ")
            if self.heads_of(source) != self.heads_of(layer):
                raise ModelError(f"layer {layer} cannot share the KV of layer {source}: their heads differ")

    def _has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ModelError(f"{name} of the model must be between {low} and {high}, got {value}")


class Settings:
    """Typed look-ups in config.json."""

    def __init__(self, tree: Mapping[str, object], source: str) -> None:
        self.tree = tree
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.source}: {key} must be an integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.source}: {key} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default))

    def get(self, key: str) -> object:
        return self.tree.get(key)

    def refuse(self, *keys: str) -> None:
        """Raises ModelError for the first of these flags that is set."""
        for key in keys:
            if self.flag(key, False):
                raise ModelError(f"{self.source} asks for {key}, which is not supported")

    def with_defaults(self, values: Mapping[str, object]) -> Settings:
        """With these for keys that are not there."""
        return Settings({**values, **self.tree}, self.source)

    def replaced(self, values: Mapping[str, object]) -> Settings:
        """With these in place of others."""
        return Settings({**self.tree, **values}, self.source)

    def part(self, given: object) -> Settings:
        """Of a tree in this one; empty, if ``given`` is none."""
        return Settings(given if isinstance(given, dict) else {}, self.source)

    def _get(self, key: str, default: object) -> object:
        value = self.tree.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source} lacks {key}")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ModelError(f"{self.source}: {key} must be between {-MAX_INTEGER} and {MAX_INTEGER}")
        return value
