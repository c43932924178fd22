"""The fields that every HTTP API puts its own into, by OpenAI's and vLLM's names, and what they mean for sampling."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec

from mooncake.errors import InvalidRequest, shown
from mooncake.sampling import BeamSearch, Guide, RepetitionDetection, SamplingParams
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults
from mooncake.sampling_params import check_one_guide, guides_of, seed_or_random


class StreamOptions(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """Clients also send a name and ``strict``; an answer always follows the schema."""

    without_effect: ClassVar = frozenset({"description", "name", "strict"})
    schema: dict[str, object] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's field for guides, one of them. Misspelled keys are refused: nothing in the answer would reveal them."""

    json: dict[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_fallback: bool | None = None  # this and the next two have no effect: all are always the case
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    # vLLM's alone: refused if they ask for something, and clients that send the whole form send them unset
    whitespace_pattern: str | None = None
    structural_tag: dict[str, object] | str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for nothing to follow, and for what is not here."""
        for name, sentence in _COUNTERPARTS.items():
            if getattr(self, name):
                raise InvalidRequest(f"structured_outputs take no {name}: {sentence}", f"structured_outputs.{name}")
        if self.is_empty:
            known = "json, json_object, regex, choice, grammar"
            raise InvalidRequest(f"structured_outputs need one of {known}", "structured_outputs")

    @property
    def is_empty(self) -> bool:
        given = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        return all(guide is None for guide in given)


_COUNTERPARTS = {
    "whitespace_pattern": "a grammar in Lark's form, or a regex, says where an answer may have whitespace",
    "structural_tag": "a grammar in Lark's form can say the same",
}


class RepetitionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's. A ``max_pattern_size`` of 0 looks for nothing."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0  # 0: 1
    min_count: int = 0


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """None means "not given", as OpenAI allows."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # None: true
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:5", where texts are ambiguous
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # where tokens are cut away: "left" (None) or "right"
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None  # part of the answer's id; this and the next are vLLM's
    session_id: str | None = None  # which requests belong together: this, or else one of the next two
    prompt_cache_key: str | None = None
    user: str | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None  # lower runs first, as in vLLM
    use_beam_search: bool | None = None  # over n beams; this and the next are vLLM's
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionFields | None = None
    thinking_token_budget: int | None = None  # the most tokens of reasoning; None or -1: any number
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def guide_field(self) -> str:
        """The field the guide comes from."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
        return next((name for name in names if getattr(self, name) is not None), "response_format")

    @property
    def has_format(self) -> bool:
        """Whether its guide is for answers in text alone; those of vLLM's fields are for any answer."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def session(self) -> str:
        """A hint which requests belong together."""
        return self.session_id or self.prompt_cache_key or self.user or ""


def chosen_variables(
    named: dict[str, object] | None, effort: str | None, template: str | None = None
) -> dict[str, object]:
    """The ``named`` variables, plus those that templates read for a thinking ``effort``: its level, or whether to think
    at all.

    Raises InvalidRequest for another template: callers are not trusted to bring a program, as with vLLM by default.
    """
    if template is not None or (named or {}).get("chat_template") is not None:
        raise InvalidRequest(
            "a request cannot set the chat template: this server renders its own, which only `mooncake serve "
            "--chat-template` (model.chat_template) changes",
            "chat_template",
        )
    grades = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return grades | (named or {})


def sampling_of(
    fields: GenerationFields,
    model: SamplingDefaults,
    max_tokens: int,
    logprobs: int | None,
    best_of: int = 0,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Fields not given default to those of ``model``. Raises InvalidRequest, naming the field. A missing seed is
    drawn."""
    defaults = NEUTRAL if fields.use_beam_search else model
    if fields.allowed_token_ids is not None and not fields.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty: no token could be drawn", "allowed_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_given(fields.min_tokens, 0),
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=0 if fields.top_k == -1 else _given(fields.top_k, defaults.top_k),  # -1 is vLLM's word for no limit
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((fields.logit_bias or {}).items())),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_words=bad_words,
        seed=seed_or_random(fields.seed),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs if fields.prompt_logprobs is None else fields.prompt_logprobs,
        n=_given(fields.n, 1),
        best_of=best_of,
        beam_search=_beams_of(fields),
        guide=_guide_of(fields),
        repetition_detection=_repetition_of(fields.repetition_detection),
    )


def _repetition_of(wanted: RepetitionFields | None) -> RepetitionDetection | None:
    if wanted is None or wanted.max_pattern_size == 0:
        return None
    return RepetitionDetection(wanted.max_pattern_size, wanted.min_count, wanted.min_pattern_size or 1)


def _beams_of(fields: GenerationFields) -> BeamSearch | None:
    if not fields.use_beam_search:
        return None
    return BeamSearch(_given(fields.length_penalty, 1.0), bool(fields.early_stopping))


def _guide_of(fields: GenerationFields) -> Guide | None:
    """Raises InvalidRequest for more than one guide, or an unknown one."""
    wanted = fields.structured_outputs or StructuredOutputs()
    if fields.structured_outputs is not None:
        wanted.check()
    guided = guides_of(
        json=fields.guided_json, regex=fields.guided_regex, choice=fields.guided_choice, grammar=fields.guided_grammar
    )
    structured = guides_of(wanted.json, wanted.json_object, wanted.regex, wanted.choice, wanted.grammar)
    guides = {f"guided_{name}": guide for name, guide in guided.items()}
    guides |= {f"structured_outputs.{name}": guide for name, guide in structured.items()}
    if (of_format := _format_guide(fields.response_format)) is not None:
        guides["response_format"] = of_format
    check_one_guide(guides)
    return next(iter(guides.values()), None)


def _format_guide(wanted: ResponseFormat | None) -> Guide | None:
    match wanted.type if wanted is not None else "text":
        case "text":
            return None
        case "json_object":
            return guides_of(json_object=True)["json_object"]
        case "json_schema":
            schema = wanted.json_schema.schema if wanted is not None and wanted.json_schema is not None else None
            if schema is None:
                raise InvalidRequest("response_format needs json_schema.schema", "response_format")
            return guides_of(json=schema)["json"]
        case other:
            known = "text, json_object, json_schema"
            raise InvalidRequest(f"the response_format {shown(other)} is not one of {known}", "response_format")


V = TypeVar("V")


def _given(value: V | None, default: V) -> V:
    return default if value is None else value


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
