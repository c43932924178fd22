"""OpenAI's wire types: what a request may contain, and how an invalid body is explained. Answers: ``openai_answers``.

Only data and its checks. What a field *does* is in ``openai``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import msgspec

from conductor.ingress.nested_fields import unknown_nested
from conductor.ingress.tools import NamedTool, SaidCall, Tool
from conductor.ingress.whole_numbers import with_whole_numbers
from mooncake.errors import InvalidRequest, shown
from mooncake.sampling import BeamSearch, Guide, RepetitionDetection, SamplingParams
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults
from mooncake.sampling_params import check_one_guide, guides_of, seed_or_random

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_FIELD_NAME = re.compile(r"\w{1,64}", re.ASCII)
_MAX_NAMED_FIELDS = 8
_MAX_FIELDS = 10_000  # of a body in which unknown ones are looked for: nobody else is served meanwhile


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
    disable_fallback: bool | None = None  # this and the next have no effect: both are always the case
    disable_any_whitespace: bool | None = None

    @property
    def is_empty(self) -> bool:
        given = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        return all(guide is None for guide in given)


class RepetitionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's. A ``max_pattern_size`` of 0 looks for nothing."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0  # 0: 1
    min_count: int = 0


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that completions and chat share. None means "not given", as OpenAI allows."""

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
    def session(self) -> str:
        """A hint which requests belong together."""
        return self.session_id or self.prompt_cache_key or self.user or ""


class AnswerFields(GenerationFields, frozen=True, kw_only=True):
    """Fields of vLLM's that completions and chats share, but not the other APIs."""

    stream_interval: int | None = None  # tokens of a chunk, but for the first one and the last
    spaces_between_special_tokens: bool | None = None  # no effect: there are none, as with vLLM's fast tokenizers
    watermarking: bool | None = None  # true is refused


class CompletionRequest(AnswerFields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None  # None is refused
    prompt_embeds: object = None  # all else is refused
    add_special_tokens: bool | None = None  # whether to add a begin-of-sequence token, if the model has one; None: true
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"annotations", "cache_control"})
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset(
        {"annotations", "audio", "function_call", "name", "reasoning_details", "refusal"}
    )
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[SaidCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None  # the reasoning before this message; the older name is accepted too
    reasoning_content: str | None = None


class ChatFields(AnswerFields, frozen=True, kw_only=True):
    """All but the messages."""

    add_special_tokens: bool | None = None  # true is refused: the chat template decides
    echo: bool | None = None  # likewise: of completions
    return_prompt_text: bool | None = None
    chat_template: str | None = None  # refused: the model's own is used; this and the next two are vLLM's
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None  # None: true, unless the last message is to be continued; vLLM's again
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # None: true, though a named tool is called once
    functions: list[msgspec.Raw] | None = None
    modalities: list[str] | None = None
    include_reasoning: bool | None = None  # None: true; vLLM's

    @property
    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class ChatRequest(ChatFields, frozen=True, kw_only=True):
    messages: list[Message]


class BatchChatRequest(ChatFields, frozen=True, kw_only=True):
    """vLLM's: conversations that are answered by one choice each."""

    messages: list[list[Message]]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def template_variables(body: ChatFields | TokenizeRequest) -> dict[str, object]:
    """Variables for the chat template. Raises InvalidRequest for contradictory ones, and for another template."""
    if body.add_generation_prompt and body.continue_final_message:
        what = "add_generation_prompt begins a new message: no continue_final_message with it"
        raise InvalidRequest(what, "continue_final_message")
    variables = chosen_variables(body.chat_template_kwargs, body.reasoning_effort, body.chat_template)
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables


def chosen_variables(
    named: dict[str, object] | None, effort: str | None, template: str | None = None
) -> dict[str, object]:
    """The ``named`` variables, plus those that templates read for a thinking ``effort``: its level, or whether to think
    at all.

    Raises InvalidRequest for another template: only with the model's own can no message forge a control token.
    """
    if template is not None or (named or {}).get("chat_template") is not None:
        raise InvalidRequest("a request brings no chat template: the model's is used", "chat_template")
    grades = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return grades | (named or {})


R = TypeVar("R", bound=msgspec.Struct)


def decode_request(body: bytes, form: type[R]) -> tuple[R, list[str]]:
    """The request, and the names of ignored fields, unless there may be far too many. Raises InvalidRequest, naming the
    field at fault."""
    try:
        try:
            request = msgspec.json.decode(body, type=form)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error) or body.count(b":") > _MAX_FIELDS:
                raise
            body = with_whole_numbers(body, form)
            request = msgspec.json.decode(body, type=form)
        if body.count(b":") > _MAX_FIELDS:  # each has one, and texts have more
            return request, []
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        nested = unknown_nested(given, form)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    known = form.__struct_fields__
    unknown = sorted(name for name in given.keys() - set(known) if _FIELD_NAME.fullmatch(name))
    num_more = len(unknown) + len(nested) - _MAX_NAMED_FIELDS
    more = [f"and {num_more} more"] if num_more > 0 else []
    named = [_with_nearest(name, known) for name in unknown[:_MAX_NAMED_FIELDS]]
    return request, (named + nested)[:_MAX_NAMED_FIELDS] + more


def _with_nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{name} (is {nearest[0]} meant?)" if nearest else name


def _explain(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    path = _PATH.search(text)
    if path is None:
        missing = re.search(r"missing required field `(\w+)`", text)
        return InvalidRequest(text, missing.group(1) if missing else None)
    what = text[: path.start()]
    return InvalidRequest(f"{path.group(1)}: {what}" if path.group(1) else what, path.group(1) or None)


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
        top_k=max(_given(fields.top_k, defaults.top_k), 0),  # some clients send -1 for "no limit"
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
    if fields.structured_outputs is not None and wanted.is_empty:
        known = "json, json_object, regex, choice, grammar"
        raise InvalidRequest(f"structured_outputs need one of {known}", "structured_outputs")
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
