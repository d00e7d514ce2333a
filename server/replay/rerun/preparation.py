"""Payloads of replay conversations, beside the recorded calls whose place they take."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from server.caching.policy import apply_caching
from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.manifest import CONTINUATION, encode_manifest
from server.conversation.store import PayloadSource
from server.payload.preparation import PayloadPreparation, PreparedPayload


class ReplayPreparation(PayloadPreparation):
    """Prepares the payloads of one replay conversation."""

    recorded: Call | None = None
    """The recorded call whose place the next payload takes."""

    async def prepare(self, tenant_id: str, source: PayloadSource) -> PreparedPayload:
        """The payload. If it has the blocks of the recorded request, it also has its cache markers."""
        prepared = await super().prepare(tenant_id, source)
        start = None if self.recorded is None else self.recorded.start
        if (
            start is None
            or not is_same_request(prepared, self.recorded)
            or start.model != prepared.model
            or "cached_content" in start.caching
        ):
            return prepared
        payload = apply_caching(prepared.built.payload, start.caching)
        return replace(prepared, built=replace(prepared.built, payload=payload))


def is_same_request(prepared: PreparedPayload, recorded: Call | None) -> bool:
    """Whether a payload has the blocks of a recorded request, to the same provider."""
    return (
        recorded is not None
        and recorded.start.provider == prepared.provider.name
        and have_same_blocks(encode_manifest(prepared.built.manifest), recorded.start.manifest)
    )


def have_same_blocks(one: Sequence[Mapping[str, JsonValue]], other: Sequence[Mapping[str, JsonValue]]) -> bool:
    """Whether two manifests list the same blocks.

    Cache markers do not count, nor does a paused answer that one of the requests continues: it is part of the answer.
    """
    one, other = ([entry for entry in each if entry["kind"] != CONTINUATION] for each in (one, other))
    if not one or len(one) != len(other):
        return False
    return all(
        (first["kind"], first["role"], first["hash"]) == (second["kind"], second["role"], second["hash"])
        for first, second in zip(one, other, strict=True)
    )
