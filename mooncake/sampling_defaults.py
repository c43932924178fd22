"""Sampling defaults recommended by a model's publisher, from its generation_config.json.

The rules are vLLM's: these values override the API's defaults and are overridden by the request; ``do_sample`` is
ignored. Pure; it opens no file (``mooncake.checkpoint`` does) and knows no wire format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mooncake.errors import ConfigError, InvalidRequest, ModelError
from mooncake.json_file import json_object
from mooncake.sampling_params import SamplingParams

_KEYS = {  # keys of generation_config.json, and our names
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for parameters that a request does not set: the API's, or a model's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # of a chat answer; None: the rest of the context

    def params(self) -> SamplingParams:
        """The parameters of a request that sets none."""
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
        return params if self.max_tokens is None else replace(params, max_tokens=self.max_tokens)


NEUTRAL = SamplingDefaults()
"""The defaults without a model's; also those of beam search, which does not sample."""


def overridden(defaults: SamplingDefaults, text: str) -> SamplingDefaults:
    """``defaults`` but for the values in ``text``, JSON in the form of a generation_config.json; "": none. Raises
    ConfigError for a name or value that no request could have: the operator wrote it."""
    if not text:
        return defaults
    name = "model.generation_overrides"
    given = json_object(text, name)
    if unknown := given.keys() - _KEYS.keys():
        raise ConfigError(f"{name} knows {', '.join(_KEYS)}, not {min(unknown)}")
    try:
        wanted = defaults_from(given, name)
    except ModelError as error:
        raise ConfigError(error.message.partition(" (")[0]) from None
    return replace(defaults, **{_KEYS[key]: getattr(wanted, _KEYS[key]) for key in given})


def defaults_from(generation: Mapping[str, object], source: str) -> SamplingDefaults:
    """From a generation_config.json. Raises ModelError for a value that no request could have: a model served without
    its publisher's recommendation only appears worse."""
    given = {name: value for key, name in _KEYS.items() if (value := generation.get(key)) is not None}
    if given.get("top_k") == -1:  # some models write "no limit" so
        given["top_k"] = NEUTRAL.top_k
    try:
        SamplingParams(**given)  # type: ignore[arg-type]  # it checks the types itself
    except InvalidRequest as error:
        raise ModelError(f'{source}: {error.message} (generation_config = "none" leaves the file out)') from None
    return SamplingDefaults(**given)  # type: ignore[arg-type]
