"""Texts that the pages show in place of codes, and the notices that follow an action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

from server.compaction.compactor import NOT_BEGUN, UNDONE
from server.compaction.plan import CompactionReason, SkipReason
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.audit import Action
from server.conversation.epoch import EpochReason
from server.conversation.identifiers import API_KEY, ASSISTANT, CONVERSATION, REPLAY, SAVED_VIEW, decode_id

ACTION_NAMES: Final[Mapping[str, str]] = {
    Action.LOGIN: "Login",
    Action.LOGOUT: "Logout",
    Action.CREATE_KEY: "Key created",
    Action.REVOKE_KEY: "Key revoked",
    Action.FORK: "Conversation forked",
    Action.CANCEL: "Turn cancelled",
    Action.COMPACT: "Conversation compacted",
    Action.UNDO_COMPACTION: "Compaction undone",
    Action.ERASE: "Conversation deleted",
    Action.EXPORT: "Conversation exported",
    Action.IMPORT: "Conversation imported",
    Action.SAVE_ASSISTANT: "Assistant saved",
    Action.SAVE_VIEW: "View saved",
    Action.RENAME_VIEW: "View renamed",
    Action.DELETE_VIEW: "View deleted",
    Action.CREATE_REPLAY: "Replay started",
    Action.PAUSE_REPLAY: "Replay paused",
    Action.CONTINUE_REPLAY: "Replay continued",
    Action.CANCEL_REPLAY: "Replay cancelled",
    Action.ERASE_REPLAY: "Replay deleted",
    Action.READ_OTHER_TENANT: "Read across tenants",
}
_OBJECT_PAGES: Final[Mapping[str, str]] = {
    CONVERSATION: "/admin/conversations/{}",
    ASSISTANT: "/admin/assistants/{}",
    API_KEY: "/admin/keys#{}",
    SAVED_VIEW: "/admin/views#{}",
    REPLAY: "/admin/replays/{}",
}
EPOCH_LABELS: Final[Mapping[EpochReason, str]] = {
    EpochReason.STARTED: "First request",
    EpochReason.ASSISTANT_CHANGED: "Assistant changed",
    EpochReason.ARGUMENTS_CHANGED: "Args changed",
    EpochReason.COMPACTED: "Compacted",
    EpochReason.SIGNED: "Compacted into a signed summary",
    EpochReason.COMPACTED_UNSIGNED: "Compacted, without the signed summary that was requested",
    EpochReason.SUMMARY_INLINED: "Signed summary written out as history",
    EpochReason.SIGNATURES_REJECTED: "Signatures rejected by the provider, left out from now on",
    EpochReason.COMPACTION_UNDONE: "Compaction undone",
    EpochReason.SUMMARISED: "Oldest history summarised",
    EpochReason.OLDEST_LEFT_OUT: "Oldest history left out, without the summary that was requested",
}
_COMPACTION_OUTCOMES: Final[Mapping[CompactionOutcome, str]] = {
    CompactionOutcome.COMPACTED: "Turns become history in the static layer.",
    CompactionOutcome.SIGNED: "The provider summarises turns in a block that it signs.",
    CompactionOutcome.SUMMARISED: "The provider summarises the oldest history.",
    CompactionOutcome.OLDEST_LEFT_OUT: "No summary is available; the oldest history is left out.",
    CompactionOutcome.UNDONE: "The latest compaction is undone.",
    CompactionOutcome.UNCHANGED: "Nothing is moved.",
}
_COMPACTION_REASONS: Final[Mapping[str, str]] = {
    CompactionReason.THRESHOLD_TURNS: "The buffer has more turns than the policy allows.",
    CompactionReason.THRESHOLD_TOKENS: "The buffer has more tokens than the policy allows.",
    CompactionReason.CARRYING_COST: "It pays off, and the waiting period is over.",
    CompactionReason.COLD_CACHE: "The provider's cache is cold: the next call writes all of it anyway.",
    CompactionReason.WINDOW: "Requests are close to the size of the model's window.",
    CompactionReason.REQUESTED: "It was requested.",
    SkipReason.SWITCHED_OFF: "The assistant's policy is not to compact.",
    SkipReason.NOTHING_TO_MOVE: "All exchanges in the buffer have to stay there.",
    SkipReason.BLOCKED_BY_OPEN_CALL: "A tool call has no result yet, and an exchange is moved only as a whole.",
    SkipReason.EXCHANGE_UNFINISHED: "The last exchange has no answer yet.",
    SkipReason.BELOW_THRESHOLD: "The buffer is below the policy's threshold.",
    SkipReason.SAVES_NOTHING: "Later calls would not be cheaper.",
    SkipReason.NOT_YET_WORTH_IT: "It would not pay off yet.",
    SkipReason.WAITS_FOR_COLD_CACHE: "It waits until the provider's cache is cold, because it costs nothing then.",
    NOT_BEGUN: "No request has been sent yet.",
    UNDONE: "A compaction was undone: from then on only force, or a short window, compacts.",
}
_TABLES: Final[Mapping[str, str]] = {
    "conversations": "The conversation itself",
    "turns": "Turns",
    "calls": "Calls to providers, with their raw bytes",
    "call_chunks": "Pieces of running calls",
    "epochs": "Epochs: static texts",
    "segments": "Segments: compacted history",
    "blobs": "Images that no other conversation contains",
    "blob_references": "Uses of images",
    "provider_caches": "Caches at the provider that no other conversation uses",
    "provider_cache_uses": "Uses of caches",
    "waiting_turns": "Places in the queue",
    "replay_items": "Its items in replays",
    "replay_results": "Results of replays",
    "conversation_facts": "Its row in the list",
    "turn_texts": "Texts for search",
    "compaction_alarms": "Alarms",
}
"""The most important tables first."""
PARAMETER: Final = "notice"


def name_action(action: str) -> str:
    """Return the label of an audited action; an action of a later release is shown as it is."""
    return ACTION_NAMES.get(action, action)


def object_url(object_id: object) -> str | None:
    """Return the page of the object with this id; None if it is not an id, or if such objects have no page."""
    for prefix, page in _OBJECT_PAGES.items():
        if isinstance(object_id, str) and decode_id(prefix, object_id) is not None:
            return page.format(quote(object_id))
    return None


def describe_outcome(report: CompactionReport) -> str:
    return _COMPACTION_OUTCOMES[report.outcome]


def describe_reason(report: CompactionReport) -> str:
    """Return why a conversation was compacted, or why not; a reason of a later release is shown as it is."""
    return _COMPACTION_REASONS.get(report.reason, report.reason)


def label_rows(rows: Mapping[str, int]) -> Sequence[tuple[str, str, int]]:
    """Return label, table and count per table. Tables of a later release come last, with their names as labels."""
    order = list(_TABLES)
    known = sorted((name for name in rows if name in _TABLES), key=order.index)
    others = sorted(name for name in rows if name not in _TABLES)
    return [(_label_table(name), name, rows[name]) for name in (*known, *others)]


def _label_table(name: str) -> str:
    schema, _, table = name.rpartition(".")
    label = _TABLES.get(table, table)
    return f"{label}, of replays" if schema and label != table else label


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A sentence at the top of a page after an action.

    The URL contains only the name of the notice, so that a link cannot make a page show any other text.
    """

    text: str
    is_good: bool = True
    """False: nothing was done, or it has not ended yet."""


NOTICES: Final[Mapping[str, Notice]] = {
    "forked": Notice(text="This is the fork. The original was not changed."),
    "cancelled": Notice(text="The turn was cancelled. The part of the answer that had arrived is kept."),
    "ended": Notice(text="The turn ended before it could be cancelled.", is_good=False),
    "cancelling": Notice(
        text="Cancellation was requested, and the turn is still running. Reload the page.", is_good=False
    ),
    "compacted": Notice(text="Compacted: the oldest exchanges are now history in the static layer."),
    "summarised": Notice(text="Compacted: the oldest history was summarised."),
    "oldest_left_out": Notice(
        text="Compacted: no summary was available. The oldest history is left out of requests from now on."
    ),
    "signed": Notice(text="Compacted: a summary that the provider has signed replaces the oldest exchanges."),
    "unchanged": Notice(text="Nothing was compacted. The reason is below.", is_good=False),
    "undone": Notice(text="The compaction was undone. Its turns are sent as messages again."),
    "view-saved": Notice(text="The view was saved. It is shown above the list."),
    "view-renamed": Notice(text="The view was renamed."),
    "view-deleted": Notice(text="The view was deleted. Conversations are not affected."),
    "erased": Notice(text="The conversation and all its data were deleted."),
}


def find_notice(query: Mapping[str, str]) -> Notice | None:
    """Return the notice that a query names; None if there is no such notice."""
    return NOTICES.get(query.get(PARAMETER, ""))


def with_notice(path: str, name: str) -> str:
    """Return the URL of a page with a notice."""
    return f"{path}{'&' if '?' in path else '?'}{urlencode({PARAMETER: name})}"
