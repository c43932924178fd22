"""vLLM's routes to the tokenizer: text or a chat to tokens, tokens to text, and what a client needs to do it alone."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.apis.intake import Intake, warning
from conductor.ingress.apis.messages import Conversation, chat_messages
from conductor.ingress.apis.openai_answers import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from conductor.ingress.apis.openai_types import DetokenizeRequest, TokenizeRequest, template_variables
from conductor.ingress.apis.openapi import Post
from conductor.ingress.http.errors import guarded, json_response
from conductor.ingress.tools import tools_of
from mooncake.errors import InvalidRequest


class TokenizerApi:
    """Every handler returns a response, whatever the input."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._pipeline = intake.pipeline
        self._prompts = intake.prompts

    def routes(self) -> list[Route]:
        return [
            Post("/tokenize", guarded(self.tokenize), TokenizeRequest),
            Post("/detokenize", guarded(self.detokenize), DetokenizeRequest),
            Route("/tokenizer_info", guarded(self.tokenizer_info), methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        body, ignored = await self._intake.decode(request, TokenizeRequest)
        self._pipeline.model.adapter_of(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if body.messages is not None:
            tools = tools_of(body.tools, body.tool_choice)
            is_begun = bool(body.continue_final_message)
            conversation = Conversation(chat_messages(body.messages), tools, template_variables(body), is_begun)
            tokens = await self._intake.encode(conversation)
        else:
            tokens = await self._prompts.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
        name = self._prompts.tokenizer.token_name
        names = [name(token_id) for token_id in tokens.tolist()] if body.return_token_strs else UNSET
        answer = TokenizeResponse(len(tokens), self._prompts.context_len, tokens.tolist(), names)
        return json_response(answer, headers=warning(ignored))

    async def detokenize(self, request: Request) -> Response:
        body, _ = await self._intake.decode(request, DetokenizeRequest)
        self._pipeline.model.adapter_of(body.model or "")
        tokens = self._prompts.as_tokens(body.tokens, "tokens")
        text = await self._prompts.decode(tokens, skip_special=False)  # detokenize shows control tokens
        return json_response(DetokenizeResponse(text))

    async def tokenizer_info(self, request: Request) -> Response:
        """lm-eval's remote tokenizer reads it."""
        tokenizer = self._prompts.tokenizer
        named = tokenizer.named_tokens
        info = TokenizerInfo(
            model_max_length=self._prompts.context_len,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token") or next(map(tokenizer.token_name, tokenizer.eos_ids), None),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=tokenizer.template_source or None,
        )
        return json_response(info)
