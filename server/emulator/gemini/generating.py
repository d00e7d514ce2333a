"""One generation: checks the request, chooses the reply, builds the response documents."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from server.emulator.exchange import Exchange
from server.emulator.gemini.caches import ExplicitCaches, ImplicitCache, extend
from server.emulator.gemini.decoding import decode
from server.emulator.gemini.errors import invalid
from server.emulator.gemini.faults import (
    blocked_prompt,
    error_before_answer,
    shape,
    window_exceeded,
    with_unknown_fields,
)
from server.emulator.gemini.models import GenerationConfig, Model, read_config
from server.emulator.gemini.prompt import Prompt, read_prompt
from server.emulator.gemini.rendering import Answer, Chunk, plan_answer, render_stream, render_unary
from server.emulator.gemini.signatures import check_signatures, sign_part
from server.emulator.gemini.turn_order import check_order, check_shape
from server.emulator.improvise import build_value, improvise
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall
from server.emulator.signing import decode_base64
from server.emulator.state import EmulatorState
from server.emulator.tokens import canonical_json

_SIGNATURE_BYTES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller, the model and the API version."""

    account: str
    version: str
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A valid request."""

    caller: Caller
    prompt: Prompt
    config: GenerationConfig
    prompt_tokens: int
    cached_tokens: int
    continued: str | None
    """The rest of the text, if the request continues a response."""


class Generator:
    """Builds generations and their responses. Ids are the same in every run with the same seed."""

    def __init__(self, state: EmulatorState, caches: ExplicitCaches, implicit_cache: ImplicitCache) -> None:
        self._state = state
        self._caches = caches
        self._implicit_cache = implicit_cache
        self._numbers = count(1)

    def accept(self, body: bytes, caller: Caller) -> Generation:
        """Validate a request. Raises `ApiError` for the first broken rule."""
        request = decode(body, "GenerateContentRequest")
        check_shape(request.get("contents", ()))
        prompt, cached_tokens = self._read_prompt(request, caller)
        config = read_config(request.get("generation_config", {}), caller.model)
        check_tools(prompt)
        check_order(prompt.contents)
        check_signatures(self._state.signer, caller.model, caller.account, prompt.contents)
        tokens = prompt.count()
        if tokens > caller.model.input_limit_tokens:
            raise invalid(window_exceeded(tokens, caller.model))
        return Generation(
            caller=caller,
            prompt=prompt,
            config=config,
            prompt_tokens=tokens,
            cached_tokens=cached_tokens or self._implicit_cache.read_and_fill(prompt, caller.account),
            continued=self._read_continuation(request.get("continuation_token")),
        )

    def answer(
        self, generation: Generation, exchange: Exchange, fault: Fault | None, *, streaming: bool
    ) -> tuple[list[dict[str, Any]], Fault | None]:
        """The documents of the response, and the fault that is to occur while they are sent.

        Raises `ApiError` if the script has a fault that prevents a response.
        """
        reply: Reply | None = None
        if generation.continued is not None:
            reply = Reply(text=generation.continued)
        elif fault is None:
            turn = self._state.next_turn(
                exchange, prompt=generation.prompt.question, after_tools=bool(generation.prompt.tool_results)
            )
            if isinstance(turn, Fault):
                fault = turn
            else:
                reply = turn
        if error := error_before_answer(fault, generation.caller.model):
            raise error
        documents = self._render(generation, reply or improvise_reply(generation), fault, streaming=streaming)
        return documents, fault

    def _render(
        self, generation: Generation, reply: Reply, fault: Fault | None, *, streaming: bool
    ) -> list[dict[str, Any]]:
        response_id = self._make_id("response", 22)
        if fault is not None and fault.kind is FaultKind.BLOCKED_PROMPT:
            return [_document(generation, Chunk(), response_id, {"promptFeedback": blocked_prompt(fault)})]
        model = generation.caller.model
        answer = shape(plan_answer(reply, model, generation.config, lambda: self._make_id("call", 8)), fault)
        if fault is not None and fault.kind is FaultKind.PAUSE:
            answer = self._pause(answer, fault)
        chunks = self._sign(generation, answer, streaming=streaming)
        documents = []
        for index, chunk in enumerate(chunks):
            candidate: dict[str, Any] = {"content": {"parts": list(chunk.parts), "role": "model"}}
            if not chunk.parts:
                candidate["content"] = {"role": "model"}
            if index == len(chunks) - 1:
                candidate |= {"finishReason": answer.finish_reason, **(answer.candidate_fields or {})}
            candidate["index"] = 0
            documents.append(_document(generation, chunk, response_id, {"candidates": [candidate]}))
        if fault is not None and fault.kind is FaultKind.UNKNOWN_PARTS:
            documents = [with_unknown_fields(document) for document in documents]
        return documents

    def _sign(self, generation: Generation, answer: Answer, *, streaming: bool) -> Sequence[Chunk]:
        caller = generation.caller

        def sign(part: Mapping[str, Any]) -> str:
            named = {"function_call": part["functionCall"]} if "functionCall" in part else part
            return sign_part(self._state.signer, caller.model, caller.account, named)

        if streaming:
            return render_stream(answer, caller.model, sign)
        return [render_unary(answer, caller.model, sign)]

    def _pause(self, answer: Answer, fault: Fault) -> Answer:
        begun, rest = answer.chunks[: fault.after_chunks], answer.chunks[fault.after_chunks :]
        text = "".join(
            part["text"] for chunk in rest for part in chunk.parts if "text" in part and not part.get("thought")
        )
        token = self._state.signer.sign("continuation", text) + text.encode()
        more = {"continuationToken": base64.b64encode(token).decode()}
        return replace(answer, chunks=begun, finish_reason="CONTINUATION", candidate_fields=more)

    def _read_prompt(self, request: Mapping[str, Any], caller: Caller) -> tuple[Prompt, int]:
        """The prompt, and how many of its tokens come from an explicit cache."""
        if name := request.get("cached_content"):
            cache = self._caches.load(name, caller.account)
            return extend(cache, request, caller.model), cache.tokens
        return read_prompt(request, caller.model), 0

    def _read_continuation(self, token: str | None) -> str | None:
        if not token:
            return None
        data = decode_base64(token) or b""
        text = data[_SIGNATURE_BYTES:].decode(errors="replace")
        if not self._state.signer.verify(data[:_SIGNATURE_BYTES], "continuation", text):
            raise invalid("Invalid continuation token.")
        return text

    def _make_id(self, kind: str, length: int) -> str:
        digest = hashlib.sha256(f"{kind} {self._state.seed} {next(self._numbers)}".encode()).digest()
        return base64.b32encode(digest).decode().lower()[:length]


def check_tools(prompt: Prompt) -> None:
    """Raise `ApiError` if a function is declared twice."""
    seen: set[str] = set()
    for declaration in (one for tool in prompt.tools for one in tool.get("function_declarations", ())):
        name = declaration.get("name", "")
        if name in seen:
            raise invalid(f"Duplicate function declaration found: {name}")
        seen.add(name)


def improvise_reply(generation: Generation) -> Reply:
    """An improvised reply within what the request allows."""
    prompt = generation.prompt
    offers = prompt.offers
    reply = improvise(prompt.question, len(prompt.contents) - 1, offers, prompt.tool_results)
    if prompt.must_call and offers and not reply.tool_calls:
        arguments = build_value({**offers[0].schema, "type": "object"}, "", prompt.question)
        return Reply(thinking=reply.thinking, tool_calls=(ToolCall(name=offers[0].name, arguments=arguments),))
    if generation.config.answer_schema is not None and not reply.tool_calls:
        schema = generation.config.answer_schema or {"type": "object", "properties": {"answer": {}}}
        return replace(reply, text=canonical_json(build_value(schema, "", prompt.question)))
    return reply


def _document(generation: Generation, chunk: Chunk, response_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **fields,
        "usageMetadata": _usage(generation, chunk),
        "modelVersion": generation.caller.model.id,
        "responseId": response_id,
    }


def _usage(generation: Generation, chunk: Chunk) -> dict[str, Any]:
    """Token counts of the whole request so far. As everywhere in the API's JSON, zeros are left out."""
    counts = {
        "promptTokenCount": generation.prompt_tokens,
        "candidatesTokenCount": chunk.candidates_tokens,
        "totalTokenCount": generation.prompt_tokens + chunk.candidates_tokens + chunk.thoughts_tokens,
        "cachedContentTokenCount": generation.cached_tokens,
        "promptTokensDetails": _by_modality(generation.prompt_tokens),
        "cacheTokensDetails": _by_modality(generation.cached_tokens),
        "thoughtsTokenCount": chunk.thoughts_tokens,
    }
    return {name: value for name, value in counts.items() if value}


def _by_modality(tokens: int) -> list[dict[str, Any]]:
    return [{"modality": "TEXT", "tokenCount": tokens}] if tokens else []
