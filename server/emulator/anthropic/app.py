"""The emulated API: routes, headers, and the path from a valid request to its response.

POST /v1/messages                   a response, whole or as a stream
POST /v1/messages/count_tokens      the same checks, only the count
GET  /v1/models, /v1/models/{id}    the models and their capabilities
"""

import json
from datetime import UTC, datetime
from typing import Any, Final

from server.emulator.anthropic import compaction
from server.emulator.anthropic.answer import Answer, list_thinking_ids, render_events, render_message
from server.emulator.anthropic.cache import CachePlan, chain_links, diagnose, take_fingerprint
from server.emulator.anthropic.caller import BINDING_CONTROLS, Caller, identify
from server.emulator.anthropic.composing import Composed, build_compaction, compose
from server.emulator.anthropic.errors import ApiProblem, Refused, invalid
from server.emulator.anthropic.model_rules import load_model
from server.emulator.anthropic.models import render_model, render_page
from server.emulator.anthropic.question import improvise_reply, read_question
from server.emulator.anthropic.sending import SendOptions, refuse_by, send_events, send_message
from server.emulator.anthropic.state import AnthropicState
from server.emulator.anthropic.validation import Admitted, admit
from server.emulator.asgi import EmulatorApp
from server.emulator.exchange import ASGIApp, Exchange
from server.emulator.reply import Fault, FaultKind
from server.emulator.state import EmulatorState

_MAX_BODY_BYTES: Final = 32 * 1024 * 1024
_REQUESTS_PER_MINUTE: Final = 4_000
_TOKENS_PER_MINUTE: Final = {"input-tokens": 2_000_000, "output-tokens": 400_000, "tokens": 2_400_000}
_MODELS: Final = "/v1/models"


def build_anthropic_app(state: EmulatorState) -> ASGIApp:
    """Build the emulator as an ASGI application with its own state."""
    return EmulatorApp(state, AnthropicApi(AnthropicState(state)).answer)


class AnthropicApi:
    def __init__(self, anthropic_state: AnthropicState) -> None:
        self._anthropic_state = anthropic_state

    async def answer(self, exchange: Exchange) -> None:
        """Respond to any request, with a request id."""
        request_id = self._anthropic_state.new_id("req")
        headers = {"request-id": request_id}
        try:
            caller = identify(exchange.request.headers)
            headers["anthropic-organization-id"] = caller.organization_id
            headers["anthropic-workspace-id"] = f"wrkspc_01{caller.organization_id.replace('-', '')[:22]}"
            await self._route(exchange, caller, headers)
        except Refused as refused:
            problem = refused.problem
            if problem.retry_after_seconds is not None:
                headers["retry-after"] = f"{problem.retry_after_seconds:g}"
            await exchange.answer_json(problem.http_status, problem.render(request_id), headers=headers)

    async def _route(self, exchange: Exchange, caller: Caller, headers: dict[str, str]) -> None:
        request = exchange.request
        match request.method, request.path.removesuffix("/"):
            case "POST", "/v1/messages":
                await self._create(exchange, caller, headers)
            case "POST", "/v1/messages/count_tokens":
                admitted = admit(_read_body(exchange), caller, self._anthropic_state, counting=True)
                await exchange.answer_json(200, {"input_tokens": admitted.total_tokens}, headers=headers)
            case "GET", "/v1/models":
                await exchange.answer_json(200, render_page(request.query), headers=headers)
            case "GET", path if path.startswith(f"{_MODELS}/"):
                model = load_model(path.removeprefix(f"{_MODELS}/"))
                await exchange.answer_json(200, render_model(model), headers=headers)
            case _:
                raise Refused(ApiProblem(type="not_found_error", message="Not Found"))

    async def _create(self, exchange: Exchange, caller: Caller, headers: dict[str, str]) -> None:
        state = self._anthropic_state.state
        started_at = state.clock()
        admitted = admit(_read_body(exchange), caller, self._anthropic_state, counting=False)
        fault, composed = self._choose_reply(exchange, admitted)
        if fault is not None and fault.kind is FaultKind.RAW:
            await exchange.answer_raw(fault)
            return
        plan = self._plan_cache(admitted, started_at)
        answer = self._build_answer(admitted, composed, plan)
        headers |= self._limits(answer, started_at)
        self._remember(admitted, answer)
        options = SendOptions(
            fault=fault,
            latency=state.latency,
            headers=headers,
            # Not before the first byte: a concurrent request does not find the entries of this one.
            begin=lambda: self._anthropic_state.cache.commit(plan),
        )
        if admitted.body.get("stream"):
            await send_events(exchange, render_events(answer), options)
        else:
            await send_message(exchange, render_message(answer), options)

    def _choose_reply(self, exchange: Exchange, admitted: Admitted) -> tuple[Fault | None, Composed]:
        """The model's reply and its fault. Raises `Refused` for faults that replace the response."""
        body = admitted.body
        is_stream = bool(body.get("stream"))
        fault = self._anthropic_state.state.take_fault(exchange)
        refuse_by(fault, is_stream=is_stream, is_compaction=admitted.wants_compaction)
        if admitted.wants_compaction:
            return fault, self._compact(admitted)
        if body["max_tokens"] == 0:
            return fault, Composed(blocks=(), stop_reason="max_tokens")
        question = read_question(body)
        turn = self._anthropic_state.state.next_turn(exchange, prompt=question.prompt, after_tools=question.after_tools)
        if isinstance(turn, Fault):
            fault = fault or turn
            turn = None
            refuse_by(fault, is_stream=is_stream)
        reply = turn or improvise_reply(question, body)
        return fault, compose(admitted, reply, self._anthropic_state, fault)

    def _compact(self, admitted: Admitted) -> Composed:
        block = compaction.build_block(
            admitted.body,
            admitted.model,
            signer=self._anthropic_state.state.signer,
            opening=admitted.opening,
            start=admitted.start,
        )
        return Composed(blocks=(build_compaction(block),), stop_reason="compaction")

    def _plan_cache(self, admitted: Admitted, started_at: float) -> CachePlan:
        links = chain_links(
            admitted.items,
            tokens=admitted.tokens,
            ttls=admitted.ttls,
            account=admitted.caller.organization_id,
            body=admitted.body,
            model=admitted.model,
        )
        return self._anthropic_state.cache.plan(
            links, minimum_tokens=admitted.model.cache_minimum_tokens, now=started_at
        )

    def _build_answer(self, admitted: Admitted, composed: Composed, plan: CachePlan) -> Answer:
        body = admitted.body
        extras: dict[str, Any] = {}
        if admitted.caller.has_beta(BINDING_CONTROLS):
            extras["input_transformations"] = list(admitted.bound.transformations)
        if body.get("context_management") is not None:
            extras["context_management"] = {"applied_edits": []}
        if body.get("diagnostics") is not None:
            previous = body["diagnostics"].get("previous_message_id")
            now = take_fingerprint(body, admitted.model, admitted.items, admitted.tokens)
            extras["diagnostics"] = (
                diagnose(self._anthropic_state.fingerprints.get(previous), now) if previous else None
            )
        return Answer(
            id=self._anthropic_state.new_id("msg"),
            model=body["model"],
            composed=composed,
            usage=plan.usage,
            extras=extras,
            speed=body.get("speed"),
        )

    def _remember(self, admitted: Admitted, answer: Answer) -> None:
        blocks = answer.composed.blocks
        if admitted.body.get("diagnostics") is not None:
            self._anthropic_state.fingerprints[answer.id] = take_fingerprint(
                admitted.body, admitted.model, admitted.items, admitted.tokens
            )
        for block in blocks:
            if block.whole["type"] == "tool_use":
                self._anthropic_state.issued[block.whole["id"]] = list_thinking_ids(blocks)
        if answer.composed.stop_reason == "pause_turn":
            prefix = admitted.end
            for block in blocks:
                prefix = prefix.extended("assistant", block.whole)
            self._anthropic_state.paused[prefix.digest] = True

    def _limits(self, answer: Answer, now: float) -> dict[str, str]:
        """The rate limit headers. Cache reads do not count."""
        paid = answer.usage.total_tokens - answer.usage.read_tokens
        used = {"input-tokens": paid, "output-tokens": answer.output_tokens, "tokens": paid + answer.output_tokens}
        reset = datetime.fromtimestamp(int(now) + 60, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        kinds = {"requests": (_REQUESTS_PER_MINUTE, 1)}
        kinds |= {kind: (limit, used[kind]) for kind, limit in _TOKENS_PER_MINUTE.items()}
        headers: dict[str, str] = {}
        for kind, (limit, spent) in kinds.items():
            headers[f"anthropic-ratelimit-{kind}-limit"] = str(limit)
            headers[f"anthropic-ratelimit-{kind}-remaining"] = str(max(0, limit - spent))
            headers[f"anthropic-ratelimit-{kind}-reset"] = reset
        return headers


def _read_body(exchange: Exchange) -> Any:
    """Decode the JSON body. Raises `Refused`."""
    if len(exchange.request.body) > _MAX_BODY_BYTES:
        raise Refused(ApiProblem(type="request_too_large", message="Request exceeds the maximum size"))
    try:
        body = exchange.request.read_json()
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid("The request body is not valid JSON: no low surrogate in string") from error
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    return body
