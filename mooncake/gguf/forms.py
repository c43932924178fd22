"""What llama.cpp's converter does to weights, and where it puts them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mooncake.model_config import ModelConfig

Form = Literal[
    "as is",
    "plus one",
    "turned",
    "transposed",
    "expert",
    "in turn",
    "stacked",
    "ungrouped",
    "rows",
    "absorbed",
    "values",
    "rates",
    "in groups",
    "by kinds",
    "listed",
    "matrices",
]
"""How the file's tensors differ from the published weight.

"plus one"    1 was added (Gemma's and Nemotron's norms)
"turned"      each head's rows are in the order of interleaved rotary pairs: (0, D/2), (1, D/2 + 1), …
"transposed"  the last two axes are swapped (GPT-2, gpt-oss's experts)
"expert"      all experts are in one tensor [E, …]
"in turn"     the weight has the columns of two tensors in turn, each [E, outputs, inputs] (gpt-oss's gate and up)
"stacked"     the weight has the rows of one tensor above those of another, in each expert (Granite's gate and up)
"rates"       -exp of the weight (of Mamba-2 and the gated delta rule)
"in groups"   a norm's weight, as one row for each group of what it normalises (Mamba-2)
"by kinds"    two tensors have all queries, then all keys, then all values; and all gates; of the weight, each key head
              has its own of all four (Qwen3-Next)
"ungrouped"   all queries, then all keys, then all values, and not by groups of heads (Falcon, GPT-NeoX, BLOOM)
"rows"        the weight is some rows of a tensor (queries, keys and values as one, in files of older converters)
"absorbed"    the weight has, in each head, the rows of one tensor [heads, inputs, outputs] above those of another
              [heads, outputs, inputs] (latent attention's keys and values)
"listed"      the weight is one number, of which the metadata have a list with one for each layer (Apertus's activation)
"matrices"    they do not differ, and are those of all experts, which models take one by one (Gemma 4, Granite)
"values"      they do not differ, and models need its values: they put its rows together anew (latent attention)
"""


@dataclass(frozen=True, slots=True)
class Source:
    """``tensors`` are names of tensors or, for what is "listed", the key of the list."""

    tensors: tuple[str, ...]
    form: Form = "as is"
    expert: int = 0
    first_row: int = 0
    layer: int = 0  # of what is "listed"
    is_tiled: bool = False  # the first value head of all key heads, then the second, …; and not head by head (Qwen3.5)

    def stored_shape(self, shape: tuple[int, ...], config: ModelConfig, which: int) -> tuple[int, ...]:
        """That of the tensor ``which``, for a weight of this ``shape``."""
        if self.form == "absorbed":
            assert config.latent is not None
            latent, heads = config.latent, config.num_heads
            return (heads, latent.value_dim, latent.rank) if which else (heads, latent.rank, latent.nope_dim)
        if self.form == "expert":
            return (config.num_experts, *shape)
        if self.form == "transposed":
            return (*shape[:-2], shape[-1], shape[-2])
        if self.form == "in turn":
            return (shape[0], shape[-1] // 2, *shape[1:-1])
        if self.form == "stacked":
            return (*shape[:-2], shape[-2] // 2, shape[-1])
        if self.form == "in groups":
            assert config.recurrence is not None
            return (config.recurrence.num_key_heads, shape[0] // config.recurrence.num_key_heads)
        if self.form == "by kinds":
            assert config.recurrence is not None
            channels = config.recurrence.channels
            return (shape[0] - channels if which else channels, *shape[1:])
        if self.form == "rows":
            return ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, *shape[1:])
        return shape

    def keeps_codes(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this ``shape`` can stay codes: its rows are stored whole, in any order."""
        if len(shape) == 3:
            return self.form in ("in turn", "transposed", "matrices", "stacked")
        forms = "as is", "turned", "expert", "ungrouped", "rows", "stacked", "by kinds"
        return len(shape) == 2 and self.form in forms
