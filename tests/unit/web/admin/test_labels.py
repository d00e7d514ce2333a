"""Texts that pages show in place of codes."""

from server.compaction.compactor import NOT_BEGUN, UNDONE
from server.compaction.plan import CompactionReason, SkipReason
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.audit import Action
from server.conversation.identifiers import API_KEY, ASSISTANT, CONVERSATION, TENANT, new_id
from server.postgres.schema import metadata
from server.web.admin.labels import (
    ACTION_NAMES,
    NOTICES,
    describe_outcome,
    describe_reason,
    find_notice,
    label_rows,
    name_action,
    object_url,
    with_notice,
)


def report(outcome: CompactionOutcome, reason: str) -> CompactionReport:
    return CompactionReport(conversation_id="conv_x", outcome=outcome, reason=reason, epoch=1)


def test_every_action_has_a_unique_name() -> None:
    assert set(ACTION_NAMES) == set(Action)
    assert len(set(ACTION_NAMES.values())) == len(Action)
    assert name_action("tenant.rename") == "tenant.rename"


def test_only_objects_with_a_page_are_linked() -> None:
    for prefix, page in ((CONVERSATION, "/admin/conversations/"), (ASSISTANT, "/admin/assistants/")):
        made = new_id(prefix)
        assert object_url(made) == f"{page}{made}"
    key = new_id(API_KEY)
    assert object_url(key) == f"/admin/keys#{key}"
    for other in (new_id(TENANT), "conv_x", "javascript:alert(1)", "", 3, None, ["conv_x"]):
        assert object_url(other) is None


def test_every_reason_of_a_compaction_has_a_sentence() -> None:
    for reason in (*CompactionReason, *SkipReason, NOT_BEGUN, UNDONE):
        assert describe_reason(report(CompactionOutcome.UNCHANGED, reason)).endswith(".")
    assert describe_reason(report(CompactionOutcome.UNCHANGED, "tomorrow")) == "tomorrow"
    for outcome in CompactionOutcome:
        assert describe_outcome(report(outcome, "carrying_cost")).endswith(".")
        assert outcome.value in NOTICES


def test_every_table_of_a_conversation_has_a_label() -> None:
    shared = {"conversations", "blobs", "provider_caches"}
    own = {table.name for table in metadata.sorted_tables if "conversation_id" in table.c}
    labelled = label_rows(dict.fromkeys(own | shared, 1))
    assert [name for words, name, _ in labelled if words == name] == []
    assert [name for _, name, _ in labelled][:2] == ["conversations", "turns"]
    assert label_rows({"replay.turns": 2, "replay.zebras": 1}) == [
        ("Turns, of replays", "replay.turns", 2),
        ("zebras", "replay.zebras", 1),
    ]
    assert label_rows({"zebras": 2, "turns": 3}) == [("Turns", "turns", 3), ("zebras", "zebras", 2)]


def test_a_notice_is_selected_by_its_name_only() -> None:
    assert with_notice("/admin/conversations", "erased") == "/admin/conversations?notice=erased"
    assert find_notice({"notice": "erased"}) is NOTICES["erased"]
    assert find_notice({"notice": "Send me your key"}) is None
    assert find_notice({}) is None
