"""Calls that belong to no turn: what the compactor asks of a model.

Each is written down before it leaves, so that a process that dies over it leaves a trace of what it may have spent, and
again when it is over. Its number is the epoch's that it was made in, below zero; attempts count on over all calls of
the epoch. Whoever asks the same in the same epoch is given the answer that has come already, or has to wait for the one
that is on its way: it is paid for.

Nobody listens while the answer comes, so an attempt may be followed by another one wherever it broke off.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from server.caching.expectation import CacheExpectation
from server.caching.policy import encode_caching
from server.compaction.report import CompactionObserver
from server.conversation.block import JsonValue
from server.conversation.cache_register import CacheKey
from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.errors import (
    DatabaseUnavailable,
    Internal,
    ProviderFailed,
    ProviderNotConfigured,
    SummaryUnavailable,
)
from server.conversation.manifest import build_manifest, encode_manifest
from server.conversation.payload import Payload
from server.conversation.shutdown import run_to_completion
from server.conversation.store import History, Store
from server.conversation.turn import StopReason
from server.payload.cache_plan import expect_background_read
from server.payload.call_records import build_end
from server.payload.settings import read_order
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer, ProviderStream
from server.providers.retry_policy import RetryPolicy, plan_retry

CANCELLED: Final = "cancelled"
"""The error code of a call that the process gave up, since it was told to stop."""
_OK: Final = 200
_UNDERWAY_SECONDS: Final = 300.0
"""For so long after its start a call may be running somewhere."""
_RECORD_TRIES: Final = 20
_RECORD_PAUSE_SECONDS: Final = 1.0
_log = logging.getLogger("strata.provider")

AnswerCheck: TypeAlias = Callable[[ProviderAnswer], bool]


def has_ended(answer: ProviderAnswer) -> bool:
    """Whether the model has said all that it had to say."""
    return answer.stop_reason is StopReason.END_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One call of no turn, whichever attempt makes it."""

    tenant_id: str
    conversation_id: str
    assistant_id: str
    provider: Provider
    payload: Payload
    start: CallStart
    """Of an attempt that is still to be numbered."""
    expectation: CacheExpectation
    template_source: str | None

    @property
    def turn_seq(self) -> int:
        return -self.start.epoch

    def call(self, start: CallStart, end: CallEnd | None) -> Call:
        return Call(turn_seq=self.turn_seq, start=start, end=end)


class BackgroundCalls:
    """Asks providers in the background, each question of an epoch once."""

    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        *,
        retry_policy: RetryPolicy | None = None,
        observer: CompactionObserver | None = None,
    ) -> None:
        """`observer` hears of each call that ends."""
        self._store = store
        self._providers = providers
        self._observer = observer
        self._retry_policy = retry_policy or RetryPolicy()

    def provider_of(self, history: History) -> Provider:
        """The one that the conversation talks to. Raises `ProviderNotConfigured`."""
        name = history.source.assistant.definition.provider
        provider = self._providers.get(name)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {name}.")
        return provider

    async def ask(
        self,
        tenant_id: str,
        history: History,
        payload: Payload,
        *,
        note: Mapping[str, JsonValue],
        accepts: AnswerCheck = has_ended,
        template_source: str | None = None,
    ) -> ProviderAnswer:
        """The answer to the payload, which is built behind the history's present epoch.

        `note` is kept among the call's warnings. It has a `kind`, and all that `past_payload` needs beside the epoch to
        build the payload again. `accepts` tells which answers of earlier calls will do; the answer of a call
        that is made now is returned whatever it is. `template_source`, of which the question was rendered, is archived
        under its SHA-256.

        Raises `ProviderFailed`, `ConversationNotFound`, `DatabaseUnavailable`, and `SummaryUnavailable` where another
        process is asking the same just now.
        """
        question = await self._put(tenant_id, history, payload, note, template_source)
        return await self._ask_patiently(question, accepts)

    async def _put(
        self,
        tenant_id: str,
        history: History,
        payload: Payload,
        note: Mapping[str, JsonValue],
        template_source: str | None,
    ) -> _Question:
        epoch, definition = history.source.epoch, history.source.assistant.definition
        if epoch is None:
            raise Internal("Before the first payload there is nothing to ask about.")
        provider = self.provider_of(history)
        profile = find_profile(definition.provider, payload.model)
        manifest = build_manifest(payload, marks_static=profile.breakpoints > 0)
        key = CacheKey(
            provider=provider.name, account=provider.account, model=payload.model, prefix_hash=epoch.prefix_hash
        )
        expectation = expect_background_read(history.source, manifest, key, profile, datetime.now(UTC))
        start = CallStart(
            attempt=0,
            provider=provider.name,
            model=payload.model,
            account=provider.account,
            epoch=epoch.number,
            started_at=datetime.now(UTC),
            manifest=encode_manifest(manifest),
            request_hash=hashlib.sha256(await provider.encode_request(payload)).digest(),
            layer_order=read_order(definition.settings, profile),
            caching=encode_caching(payload),
            cache_expected_tokens=expectation.tokens,
            warnings=(dict(note),),
        )
        return _Question(
            tenant_id=tenant_id,
            conversation_id=history.source.conversation.id,
            assistant_id=history.source.assistant.id,
            provider=provider,
            payload=payload,
            start=start,
            expectation=expectation,
            template_source=template_source,
        )

    async def _ask_patiently(self, question: _Question, accepts: AnswerCheck) -> ProviderAnswer:
        began, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            stream = question.provider.open_stream(question.payload)
            begun = await self._begin(question, stream, accepts)
            if isinstance(begun, ProviderAnswer):
                return begun
            failure = await self._listen(question, begun, stream)
            if failure is None:
                return stream.answer
            delay = self._plan(question, failure, attempt, time.monotonic() - began)
            if delay is None:
                raise failure
            await asyncio.sleep(delay)

    async def _begin(
        self, question: _Question, stream: ProviderStream, accepts: AnswerCheck
    ) -> CallStart | ProviderAnswer:
        """Writes down that a call leaves, unless its answer is there, or underway to somebody else.

        Of two that come at the same time only one gets the number, and the other one looks again.
        """
        while True:
            earlier = await self._store.list_calls(question.tenant_id, question.conversation_id, question.turn_seq)
            known = _find_answer(question, earlier, accepts)
            if known is not None:
                return known
            if _is_underway(question, earlier):
                raise SummaryUnavailable("Another process has just asked, and its answer will do.")
            start = replace(
                question.start,
                attempt=len(earlier) + 1,
                started_at=datetime.now(UTC),
                warnings=(*stream.warnings, *question.start.warnings),
            )
            call = question.call(start, None)
            if await self._store.record_call(
                question.tenant_id, question.conversation_id, call, template_source=question.template_source
            ):
                return start

    async def _listen(self, question: _Question, start: CallStart, stream: ProviderStream) -> ProviderFailed | None:
        """Until the call is over, and written down, however it ended. Why it failed, if it did."""
        failure: ProviderFailed | None = None
        code: str | None = Internal.code
        try:
            async with aclosing(stream.events()) as events:
                async for _ in events:
                    pass
            code = None
        except ProviderFailed as error:
            failure, code = error, error.code
        except asyncio.CancelledError:
            code = CANCELLED
            raise
        finally:
            end = build_end(stream, start.model, question.expectation, code)
            if self._observer is not None:
                self._observer.call_ended(start, end, assistant_id=question.assistant_id)
            await run_to_completion(self._end(question, start, end))
        return failure

    async def _end(self, question: _Question, start: CallStart, end: CallEnd) -> None:
        """Tries for as long as it may help: an answer that is not written down has to be paid for again."""
        for remaining in reversed(range(_RECORD_TRIES)):
            try:
                await self._store.record_call(question.tenant_id, question.conversation_id, question.call(start, end))
            except DatabaseUnavailable:
                if not remaining:
                    raise
                await asyncio.sleep(_RECORD_PAUSE_SECONDS)
            else:
                return

    def _plan(self, question: _Question, failure: ProviderFailed, attempt: int, elapsed_seconds: float) -> float | None:
        delay = plan_retry(
            self._retry_policy,
            failure,
            attempt=attempt,
            elapsed_seconds=elapsed_seconds,
            events_given=False,
            chance=random.random(),  # noqa: S311  reason: spreads retries, guards nothing
        )
        _log.warning(
            "provider.call_failed",
            extra={
                "provider": question.provider.name,
                "model": question.payload.model,
                "attempt": attempt,
                "code": failure.code,
                "retry_in_seconds": delay,
            },
        )
        return delay


def _is_underway(question: _Question, earlier: Sequence[Call]) -> bool:
    """Whether somebody waits for the same answer. One that has waited for very long has died over it."""
    since = datetime.now(UTC) - timedelta(seconds=_UNDERWAY_SECONDS)
    return any(
        call.end is None and call.start.request_hash == question.start.request_hash and call.start.started_at > since
        for call in earlier
    )


def _find_answer(question: _Question, earlier: Sequence[Call], accepts: AnswerCheck) -> ProviderAnswer | None:
    """What the same request has given before, byte for byte the same."""
    for call in reversed(earlier):
        end = call.end
        if (
            end is None
            or end.status != _OK
            or end.error_code is not None
            or not end.raw_response
            or call.start.request_hash != question.start.request_hash
        ):
            continue
        answer = question.provider.fold_body(end.raw_response)
        if accepts(answer):
            return answer
    return None
