"""The stored records of a call, at its start and at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from decimal import Decimal

from server.caching.expectation import CacheExpectation, MissReason, explain_miss
from server.caching.policy import encode_caching
from server.conversation.block import JsonValue
from server.conversation.call import OUTCOME_UNKNOWN, CallEnd, CallStart
from server.conversation.manifest import ManifestBase, NewManifest, extend_manifest
from server.conversation.payload import Payload
from server.conversation.store import PayloadSource
from server.conversation.usage import Usage
from server.payload.dynamic_clock import encode_clock
from server.payload.preparation import PreparedPayload
from server.providers.continuation import note_container, note_continuation
from server.providers.pricing import price_call
from server.providers.provider import ProviderAnswer, ProviderStream
from server.providers.token_estimate import TokenEstimate


def describe_unknown_outcome(
    model: str, at: datetime, size_bytes: int, estimate: TokenEstimate
) -> dict[str, JsonValue]:
    """Return the warning for a call with unknown outcome, with an estimate of its minimum cost: the input."""
    tokens = estimate.estimate(model, size_bytes)
    cost = price_call(model, at, Usage(fresh_input_tokens=tokens))
    total = None if cost is None else cost.total_usd
    return {
        "kind": OUTCOME_UNKNOWN,
        "estimated_input_tokens": tokens,
        "estimated_cost_usd": None if total is None else str(total),
    }


def build_call_start(
    prepared: PreparedPayload,
    attempt: int,
    stream: ProviderStream,
    payload: Payload,
    container: Mapping[str, JsonValue] | None = None,
    *,
    earlier: CallStart | None = None,
) -> CallStart:
    """Return the record of a call that was sent with this payload. `container` is the one that the answer names, if
    known. `earlier` is the record of the same call when it was sent; since then only warnings can have been added.
    """
    warnings = (
        *note_container(payload, container),
        *stream.warnings,
        *prepared.built.warnings,
        *note_continuation(payload),
    )
    if earlier is not None:
        return replace(earlier, warnings=warnings)
    record = stream.record
    return CallStart(
        attempt=attempt,
        provider=prepared.provider.name,
        model=prepared.model,
        account=prepared.provider.account,
        epoch=prepared.epoch,
        started_at=record.started_at,
        manifest=(),
        new_manifest=NewManifest(
            entries=extend_manifest(prepared.built.manifest, payload), base=_find_base(prepared.source, prepared.epoch)
        ),
        request_hash=prepared.request_hashes.digest(prepared.source.conversation.id, record.request_body),
        layer_order=prepared.built.order,
        dynamic=(prepared.built.dynamic_sent or "").encode("utf-8", "surrogatepass"),
        caching=encode_caching(payload) | encode_clock(prepared.built.clock),
        cache_expected_tokens=_expectation_of(prepared, payload).tokens,
        repairs=prepared.built.repairs,
        template_failures=tuple(asdict(failure) for failure in prepared.template_failures),
        warnings=warnings,
    )


def _find_base(source: PayloadSource, epoch: int) -> ManifestBase | None:
    """The previous call, if it belongs to the same epoch: then the two manifests are nearly the same."""
    if source.previous_key is None or source.previous_epoch != epoch:
        return None
    turn_seq, attempt = source.previous_key
    return ManifestBase(turn_seq=turn_seq, attempt=attempt, entries=source.previous_manifest)


def build_call_end(
    prepared: PreparedPayload, stream: ProviderStream, payload: Payload, error_code: str | None
) -> CallEnd:
    """Return the record of a call of a turn that has ended."""
    return build_end(stream, prepared.model, _expectation_of(prepared, payload), error_code)


def build_end(stream: ProviderStream, model: str, expectation: CacheExpectation, error_code: str | None) -> CallEnd:
    """Return the record of any call that has ended."""
    record, answer = stream.record, stream.answer
    return CallEnd(
        ended_at=record.ended_at or datetime.now(UTC),
        first_byte_at=record.first_byte_at,
        status=record.status,
        headers=record.headers,
        raw_response=record.body,
        usage=answer.usage,
        usage_reported=answer.usage_reported,
        response_id=answer.response_id,
        cache_miss_reason=explain_miss(expectation, answer.usage, answer.cache_miss_reason),
        cost_usd=price_answer(model, record.started_at, answer),
        error_code=error_code,
    )


def build_bare_call_end(stream: ProviderStream, error_code: str | None) -> CallEnd:
    """Return the record of a call whose answer cannot be stored: its bytes and times only.

    Its cost is unknown, because its usage is.
    """
    record = stream.record
    return CallEnd(
        ended_at=record.ended_at or datetime.now(UTC),
        first_byte_at=record.first_byte_at,
        status=record.status,
        raw_response=record.body,
        cost_usd=None,
        error_code=error_code,
    )


def _expectation_of(prepared: PreparedPayload, payload: Payload) -> CacheExpectation:
    """The planned expectation. A call that had to be sent without its planned explicit cache is expected to read
    nothing.
    """
    planned = prepared.caching
    if payload.continues:
        # The plan is for the first request of the turn; this one reads at least what that one has written.
        return CacheExpectation(tokens=None)
    if planned.cache is None or payload.cached_content is not None:
        return planned.expectation
    return CacheExpectation(possible_tokens=planned.cache.token_count, reason=MissReason.CACHE_GONE)


def price_answer(model: str, at: datetime, answer: ProviderAnswer) -> Decimal | None:
    """Return the cost of a call: 0 if no usage was reported, None if the price is unknown."""
    if answer.usage == Usage():
        return Decimal(0)
    cost = price_call(model, at, answer.usage, long_write_tokens=answer.long_write_tokens)
    return None if cost is None else cost.total_usd


def add_costs(costs: Sequence[Decimal | None]) -> Decimal | None:
    """Return the sum; None if any cost is unknown."""
    known = [cost for cost in costs if cost is not None]
    return sum(known, Decimal(0)) if len(known) == len(costs) else None
