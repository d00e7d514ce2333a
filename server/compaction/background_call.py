"""Calls that belong to no turn: summaries, signed summaries, and the judges of replays.

A call is recorded before it is sent, so a process that dies leaves a record of what it may have spent, and again when
it has ended. Its turn number is the negative number of the epoch that it was made in, and attempts are numbered over
all such calls of the epoch. A request that was answered before in the same epoch is not sent again.

No client follows the answer, so an attempt that broke off can always be followed by another one.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from server.caching.expectation import CacheExpectation
from server.caching.policy import encode_caching
from server.compaction.report import CompactionObserver
from server.conversation.block import JsonValue
from server.conversation.cache_register import CacheKey
from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.errors import Internal, ProviderNotConfigured, SummaryUnavailable
from server.conversation.manifest import build_manifest, encode_manifest
from server.conversation.outages import retry_while_unavailable
from server.conversation.payload import LayerOrder, Payload
from server.conversation.shutdown import run_to_completion
from server.conversation.store import History, Store
from server.conversation.turn import StopReason
from server.payload.cache_plan import expect_background_read
from server.payload.call_records import build_end
from server.payload.settings import read_order
from server.providers.calls import Admission, Attempt, CallHooks, RetryingCall
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer
from server.providers.retry_policy import RetryPolicy

CANCELLED: Final = "cancelled"
"""The error code of a call that was given up because the process stops."""
_OK: Final = 200
_UNDERWAY_SECONDS: Final = 300.0
"""For this time after its start, a call without an end may still be running in another process."""

AnswerCheck: TypeAlias = Callable[[ProviderAnswer], bool]


def has_ended(answer: ProviderAnswer) -> bool:
    """Whether the model has finished its answer."""
    return answer.stop_reason is StopReason.END_TURN


class BackgroundCallLog:
    """The calls of one epoch that belong to no turn, as far as they were read."""

    def __init__(self, store: Store, tenant_id: str, conversation_id: str, epoch: int) -> None:
        self.epoch = epoch
        self.conversation_id = conversation_id
        self._store = store
        self._tenant_id = tenant_id
        self._calls: list[Call] | None = None

    async def find_answer(self, provider: Provider, request_hash: bytes, accepts: AnswerCheck) -> ProviderAnswer | None:
        """The newest accepted answer to the same request, byte for byte."""
        for call in reversed(await self._known()):
            end = call.end
            if (
                end is None
                or end.status != _OK
                or end.error_code is not None
                or not end.raw_response
                or call.start.request_hash != request_hash
            ):
                continue
            answer = provider.fold_body(end.raw_response)
            if accepts(answer):
                return answer
        return None

    async def is_underway(self, request_hash: bytes) -> bool:
        """Whether another process may still receive the answer to the same request."""
        since = datetime.now(UTC) - timedelta(seconds=_UNDERWAY_SECONDS)
        return any(
            call.end is None and call.start.request_hash == request_hash and call.start.started_at > since
            for call in await self._known()
        )

    async def begin(self, start: CallStart, *, template_source: str | None) -> CallStart | None:
        """Records the call under the next number. None if another process has taken that number: look again."""
        known = await self._known()
        numbered = replace(start, attempt=len(known) + 1, started_at=datetime.now(UTC))
        call = Call(turn_seq=-self.epoch, start=numbered, end=None)
        if await self._store.record_call(self._tenant_id, self.conversation_id, call, template_source=template_source):
            known.append(call)
            return numbered
        self._calls = None
        return None

    async def end(self, start: CallStart, end: CallEnd) -> None:
        """Records the end of a call. Waits if the database is away: an answer that is lost is paid for again."""
        call = Call(turn_seq=-self.epoch, start=start, end=end)
        await retry_while_unavailable(
            lambda: self._store.record_call(self._tenant_id, self.conversation_id, call),
        )
        known = await self._known()
        known[start.attempt - 1 : start.attempt] = [call]

    async def _known(self) -> list[Call]:
        if self._calls is None:
            self._calls = list(await self._store.list_calls(self._tenant_id, self.conversation_id, -self.epoch))
        return self._calls


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundQuestion:
    """A request that belongs to no turn."""

    provider: Provider
    payload: Payload
    layer_order: LayerOrder
    note: Mapping[str, JsonValue]
    """Kept among the call's warnings. It has a `kind`, and what is needed beside the epoch to rebuild the payload."""
    marks_static: bool = False
    """Whether the manifest shows the cache marker of the static layer."""
    expectation: CacheExpectation = field(default_factory=CacheExpectation)
    template_source: str | None = None
    """The template that the question was rendered from; archived under its SHA-256."""


async def ask_in_background(
    log: BackgroundCallLog,
    question: BackgroundQuestion,
    policy: RetryPolicy,
    *,
    accepts: AnswerCheck,
    on_ended: Callable[[CallStart, CallEnd], None],
    admission: Admission | None = None,
    is_exclusive: bool = False,
) -> ProviderAnswer:
    """The answer to the question. `accepts` chooses among answers of earlier calls; a new answer is always returned.

    `is_exclusive`: no other process can be asking the same, so a call without an end was lost.

    Raises `ProviderFailed`, `ConversationNotFound`, `DatabaseUnavailable`, what the admission raises, and
    `SummaryUnavailable` if another process is asking the same now.
    """
    recorder = _CallRecorder(log, question, accepts, on_ended, admission, is_exclusive=is_exclusive)
    request = await question.provider.encode_request(question.payload)
    known = await log.find_answer(question.provider, hashlib.sha256(request).digest(), accepts)
    if known is not None:
        return known
    call = RetryingCall(
        question.provider,
        question.payload,
        # A continuation could not be found again by the hash of the question.
        replace(policy, max_continuations=0),
        hooks=CallHooks(admit=recorder.begin, after_failure=recorder.end_failed),
        retries_after_events=True,
    )
    code: str | None = Internal.code
    try:
        async for _ in call.event_batches():
            pass
        code = None
    except asyncio.CancelledError:
        code = CANCELLED
        raise
    finally:
        await recorder.end(call.attempts[-1] if call.attempts else None, code)
    return call.answer


class _CallRecorder:
    """Records the attempts of one background call."""

    def __init__(
        self,
        log: BackgroundCallLog,
        question: BackgroundQuestion,
        accepts: AnswerCheck,
        on_ended: Callable[[CallStart, CallEnd], None],
        admission: Admission | None,
        *,
        is_exclusive: bool,
    ) -> None:
        self._log = log
        self._question = question
        self._accepts = accepts
        self._on_ended = on_ended
        self._admission = admission
        self._is_exclusive = is_exclusive
        self._start: CallStart | None = None
        """Of the attempt whose end is not recorded yet."""

    async def begin(self, attempt: Attempt) -> None:
        """Admits and records an attempt. Raises `SummaryUnavailable` if another process asks the same."""
        question, provider = self._question, self._question.provider
        request = await provider.encode_request(attempt.payload)
        if self._admission is not None:
            await self._admission.admit(provider, attempt.payload, len(request))
        start = CallStart(
            attempt=0,
            provider=provider.name,
            model=attempt.payload.model,
            account=provider.account,
            epoch=self._log.epoch,
            started_at=datetime.now(UTC),
            manifest=encode_manifest(build_manifest(attempt.payload, marks_static=question.marks_static)),
            request_hash=hashlib.sha256(request).digest(),
            layer_order=question.layer_order,
            caching=encode_caching(attempt.payload),
            cache_expected_tokens=question.expectation.tokens,
            warnings=(*attempt.stream.warnings, dict(question.note)),
        )
        while self._start is None:
            if not self._is_exclusive and await self._log.is_underway(start.request_hash):
                raise SummaryUnavailable("Another process is asking the same; its answer will do.")
            self._start = await self._log.begin(start, template_source=question.template_source)
            if self._start is None and await self._log.find_answer(provider, start.request_hash, self._accepts):
                raise SummaryUnavailable("Another process has just received the answer.")

    async def end_failed(self, attempt: Attempt, delay: float | None) -> float:
        await self.end(attempt, attempt.failure_code)
        return (delay or 0.0) if self._admission is None else await self._admission.after_failure(attempt, delay)

    async def end(self, attempt: Attempt | None, code: str | None) -> None:
        """Records the end of the attempt that was begun last, unless that was done before."""
        start, self._start = self._start, None
        if start is None or attempt is None:
            return
        end = build_end(attempt.stream, start.model, self._question.expectation, code)
        self._on_ended(start, end)
        await run_to_completion(self._store_end(start, end))

    async def _store_end(self, start: CallStart, end: CallEnd) -> None:
        await self._log.end(start, end)
        if self._admission is not None:
            await self._admission.settle(end)


class BackgroundCalls:
    """Asks the models of conversations for summaries."""

    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        *,
        retry_policy: RetryPolicy | None = None,
        observer: CompactionObserver | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._store = store
        self._providers = providers
        self._observer = observer
        self._retry_policy = retry_policy or RetryPolicy()
        self._admission = admission

    def provider_of(self, history: History) -> Provider:
        """The provider of the conversation. Raises `ProviderNotConfigured`."""
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
        """The answer to a payload that continues the history's present epoch. See `ask_in_background`."""
        epoch, definition = history.source.epoch, history.source.assistant.definition
        if epoch is None:
            raise Internal("A conversation without an epoch has no history to ask about.")
        provider = self.provider_of(history)
        profile = find_profile(definition.provider, payload.model)
        marks_static = profile.breakpoints > 0
        manifest = build_manifest(payload, marks_static=marks_static)
        key = CacheKey(
            provider=provider.name, account=provider.account, model=payload.model, prefix_hash=epoch.prefix_hash
        )
        question = BackgroundQuestion(
            provider=provider,
            payload=payload,
            layer_order=read_order(definition.settings, profile),
            note=note,
            marks_static=marks_static,
            expectation=expect_background_read(history.source, manifest, key, profile, datetime.now(UTC)),
            template_source=template_source,
        )

        def notify(start: CallStart, end: CallEnd) -> None:
            if self._observer is not None:
                self._observer.call_ended(start, end, assistant_id=history.source.assistant.id)

        return await ask_in_background(
            BackgroundCallLog(self._store, tenant_id, history.source.conversation.id, epoch.number),
            question,
            self._retry_policy,
            accepts=accepts,
            on_ended=notify,
            admission=self._admission,
        )
