"""The model as clients see it: its names, limits and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncake.adapters import Adapter
from mooncake.errors import NotFound, shown
from mooncake.pooling import LAST_TOKEN, PoolingSettings
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults


class UnknownModel(NotFound):
    """The error code that clients of OpenAI's API expect."""

    code = "model_not_found"


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_model_len: int  # tokens of prompt plus answer
    vocab_size: int
    block_tokens: int
    dtype: str
    fingerprint: str  # changes with the weights
    created: int  # seconds since 1970
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # by the names that clients use
    sampling: SamplingDefaults = NEUTRAL  # defaults of requests
    chat_variables: Mapping[str, object] = field(default_factory=dict)  # of the chat template, where requests name none
    takes_rendered: bool = False  # whether control tokens that text prompts spell are that
    root: str = ""  # what was given as the model: a folder, a file, or a name
    adapter_roots: Mapping[str, str] = field(default_factory=dict)  # folders by configured adapter
    loaded: Mapping[str, Adapter] = field(default_factory=dict)  # adapters beside those; they change
    hidden_size: int = 0  # numbers of an embedding
    pooling: PoolingSettings | str = LAST_TOKEN  # how texts are embedded; or why they cannot be, in words
    has_head: bool = True  # otherwise it embeds texts, and generates none

    @property
    def names(self) -> tuple[str, ...]:
        """Its own and its adapters'."""
        return (self.name, *self.adapters, *self.loaded)

    def root_of(self, name: str) -> str:
        """Where the model or the adapter of that name was loaded from."""
        return str(self.loaded[name].path) if name in self.loaded else self.adapter_roots.get(name, self.root)

    def adapter_of(self, name: str) -> Adapter | None:
        """The adapter of that name; None for the base model or no name. Raises NotFound."""
        if not name or name == self.name:
            return None
        adapter = self.adapters.get(name) or self.loaded.get(name)
        if adapter is None:
            served = ", ".join(map(repr, self.names))
            raise UnknownModel(f"the model {shown(name)} is not served here; served: {served}")
        return adapter
