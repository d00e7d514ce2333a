"""Why a static layer changed, for people."""

from collections.abc import Mapping
from typing import Final

from server.conversation.epoch import EpochReason

EPOCH_WORDS: Final[Mapping[EpochReason, str]] = {
    EpochReason.STARTED: "First request",
    EpochReason.ASSISTANT_CHANGED: "Assistant changed",
    EpochReason.ARGUMENTS_CHANGED: "Args changed",
    EpochReason.COMPACTED: "Compacted",
    EpochReason.SIGNED: "Compacted into a signed block",
    EpochReason.COMPACTED_UNSIGNED: "Compacted, without the signed block that was wanted",
    EpochReason.SUMMARY_INLINED: "Signed block written out as history",
    EpochReason.SIGNATURES_REJECTED: "Signatures rejected by the provider, left out from now on",
    EpochReason.COMPACTION_UNDONE: "Compaction undone",
    EpochReason.SUMMARISED: "Oldest history summed up",
    EpochReason.OLDEST_LEFT_OUT: "Oldest history left out, without the summary that was wanted",
}
