"""The payload of any past call as it was sent.

A call that belongs to no turn has a warning that states its purpose and what is needed to rebuild it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from server.caching.policy import apply_caching
from server.compaction.signed_summary import SIGNED_COMPACTION, build_compaction_payload
from server.compaction.summary import SUMMARY, SummaryPrompt, build_summary_payload
from server.conversation.block import JsonValue
from server.conversation.errors import Internal
from server.conversation.manifest import build_manifest
from server.conversation.payload import ManifestEntry, Payload
from server.conversation.store import RebuildSource
from server.inspection.judge_payload import JUDGE, build_judge_payload
from server.payload.builder import rebuild_payload
from server.providers.provider import Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPayload:
    """A payload as it was sent, with its manifest."""

    payload: Payload
    manifest: tuple[ManifestEntry, ...]
    """Its cache markers are those that this release would set; the payload has those that were sent."""


def rebuild_call(rebuild: RebuildSource, *, provider: Provider) -> Payload:
    """Rebuild the payload of a past call. The account of `provider` does not matter."""
    if rebuild.call.turn_seq > 0:
        return rebuild_payload(rebuild, provider=provider).payload
    return _rebuild_background(rebuild, provider)


def rebuild_whole(rebuild: RebuildSource, *, provider: Provider) -> PastPayload:
    """Rebuild the payload of a past call with its manifest."""
    if rebuild.call.turn_seq > 0:
        built = rebuild_payload(rebuild, provider=provider)
        return PastPayload(payload=built.payload, manifest=built.manifest)
    payload = _rebuild_background(rebuild, provider)
    return PastPayload(payload=payload, manifest=build_manifest(payload))


def _rebuild_background(rebuild: RebuildSource, provider: Provider) -> Payload:
    notes = {str(warning.get("kind")): warning for warning in rebuild.call.start.warnings}
    if SUMMARY in notes:
        return _rebuild_summary(rebuild, provider, notes[SUMMARY])
    if SIGNED_COMPACTION in notes:
        return _rebuild_compaction(rebuild, provider)
    if JUDGE in notes:
        note = notes[JUDGE]
        return build_judge_payload(
            provider, rebuild.call.start.model, note["prompt"], note["settings"], note["question"]
        )
    raise Internal("A call that belongs to no turn does not state its purpose.")


def _rebuild_summary(rebuild: RebuildSource, provider: Provider, note: Mapping[str, JsonValue]) -> Payload:
    source = rebuild.source
    if source.static_text is None:
        raise Internal("A past call has no epoch.")
    question = SummaryPrompt(task=note["task"], limit_tokens=note["limit_tokens"])
    payload = build_summary_payload(provider, source.assistant.definition, source.static_text, question)
    return apply_caching(payload, rebuild.call.start.caching)


def _rebuild_compaction(rebuild: RebuildSource, provider: Provider) -> Payload:
    source, start = rebuild.source, rebuild.call.start
    if source.static_text is None:
        raise Internal("A past call has no epoch.")
    payload = build_compaction_payload(
        source,
        provider=provider,
        account=start.account,
        static_text=source.static_text,
        last_seq=rebuild.call.trigger_seq,
        blobs=source.blobs,
    )
    return apply_caching(payload, start.caching)
