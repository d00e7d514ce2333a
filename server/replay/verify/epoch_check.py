"""Consistency of the epochs of a conversation.

Rebuilt requests verify the parts of an epoch that were sent. The other columns, which the next turn, the next
compaction and its reversal depend on, are checked here.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from server.conversation.assistant import Tool
from server.conversation.conversation import Conversation
from server.conversation.epoch import NOTHING_REJECTED, Epoch, EpochReason, Segment
from server.payload.arguments import hash_arguments
from server.payload.builder import hash_chain, hash_prefix
from server.replay.verify.recorded_calls import Flaw


def check_order(conversation: Conversation, epochs: Mapping[int, Epoch]) -> Iterator[Flaw]:
    """Check that no epoch is missing, and that the current one has the conversation's buffer. There may be newer."""
    missing = next((number for number in range(1, conversation.epoch + 1) if number not in epochs), None)
    if missing is not None:
        yield Flaw(position=f"epoch {missing}", note="The epoch is missing.")
    present = epochs.get(conversation.epoch)
    if present is not None and present.buffer_start_seq != conversation.buffer_start_seq:
        yield Flaw(
            position="conversation.buffer_start_seq",
            note="The start of the buffer differs from that of the current epoch.",
            stored=str(conversation.buffer_start_seq),
            found=str(present.buffer_start_seq),
        )


def check_epoch(
    epoch: Epoch, before: Epoch | None, static_text: str, segments: Sequence[Segment], tools: Sequence[Tool]
) -> Iterator[Flaw]:
    """Check one epoch against its predecessor. `segments` and `tools` are its own."""
    yield from _check_coverage(epoch, segments)
    if epoch.args is not None and epoch.arguments_hash and hash_arguments(epoch.args) != epoch.arguments_hash:
        yield _differ(epoch, "args", "The args do not match their hash.", epoch.arguments_hash)
    yield from _check_rejected(epoch, before)
    # A damaged static text is reported by the code that reads it. Old epochs have an empty prefix hash.
    is_whole = hashlib.sha256(static_text.encode("utf-8", "surrogatepass")).digest() == epoch.static_hash
    expected = _expect_prefix(epoch, before, static_text, tools)
    if is_whole and epoch.prefix_hash and epoch.prefix_hash not in expected:
        yield _differ(epoch, "prefix_hash", "The hash does not match the static text and the tools.", epoch.prefix_hash)


def _check_coverage(epoch: Epoch, segments: Sequence[Segment]) -> Iterator[Flaw]:
    """Check that every turn before the buffer is covered once, by a segment or the signed summary, in order."""
    positions = [segment.position for segment in segments]
    if len(positions) != epoch.segment_count or positions != list(range(len(positions))):
        note = "A segment of the epoch is missing."
        found = ", ".join(map(str, positions))
        yield Flaw(position=f"epoch {epoch.number} segments", note=note, stored=f"{epoch.segment_count}", found=found)
        return
    spans = [(segment.first_seq, segment.last_seq) for segment in segments]
    if epoch.signed_summary is not None:
        spans.append((epoch.signed_summary.start_seq, epoch.buffer_start_seq - 1))
    covered = 0
    for first, last in spans:
        if first != covered + 1 or last < first:
            break
        covered = last
    else:
        if covered == epoch.buffer_start_seq - 1:
            return
    yield Flaw(
        position=f"epoch {epoch.number} segments",
        note="There is a gap or an overlap between the segments, the signed summary and the buffer.",
        stored=", ".join(f"{first} to {last}" for first, last in spans[-4:]),
        found=f"a buffer from {epoch.buffer_start_seq}, covered up to {covered}",
    )


def _check_rejected(epoch: Epoch, before: Epoch | None) -> Iterator[Flaw]:
    """Check that rejected content stays excluded. Only an epoch with such a reason may exclude more."""
    was = {} if before is None else before.rejected
    if epoch.rejected == was:
        return
    grows = epoch.reason in {EpochReason.SIGNATURES_REJECTED, EpochReason.SUMMARY_INLINED} and all(
        epoch.rejected.get(provider, NOTHING_REJECTED).signatures_through_seq >= old.signatures_through_seq
        and epoch.rejected.get(provider, NOTHING_REJECTED).calls_through_seq >= old.calls_through_seq
        for provider, old in was.items()
    )
    if not grows:
        note = "The rejected content differs from the previous epoch's without a reason."
        yield Flaw(position=f"epoch {epoch.number} rejected", note=note, stored=str(epoch.rejected), found=str(was))


def _expect_prefix(epoch: Epoch, before: Epoch | None, static_text: str, tools: Sequence[Tool]) -> Iterator[bytes]:
    """Yield the valid prefix hashes. With a signed summary it is that of the epoch in which the summary was created:
    this one, or the previous one.
    """
    prefix = hash_prefix(static_text, tools)
    if epoch.signed_summary is None:
        yield prefix
        return
    yield hash_chain(prefix, epoch.number)
    if before is not None and before.signed_summary is not None:
        yield before.prefix_hash


def _differ(epoch: Epoch, name: str, note: str, stored: bytes) -> Flaw:
    return Flaw(position=f"epoch {epoch.number} {name}", note=note, stored=stored.hex())
