"""The page of a conversation: a part of its timeline, and its totals."""

from collections.abc import Sequence
from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation
from server.conversation.usage import Usage
from server.inspection.admin_sessions import AdminSession
from server.inspection.excerpts import Excerpt, excerpt_value
from server.inspection.port import Inspector
from server.inspection.timeline import Timeline
from server.web.admin.conversation_filters import FLAGS
from server.web.admin.labels import EPOCH_LABELS
from server.web.admin.page_budget import PageBudget
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.shown_turns import MIN_BYTES, PAGE_BYTES, show_turn
from server.web.request import StrataRequest
from server.web.validation import refuse

_TURNS: Final = 40
_VALUE_BYTES: Final = 4_000


@get("/conversations/{conversation_id:str}")
async def show_conversation_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    after: Annotated[int | None, QueryParameter(ge=0)] = None,
    before: Annotated[int | None, QueryParameter(ge=0)] = None,
    around: Annotated[int | None, QueryParameter(ge=0)] = None,
    jump: Annotated[int | None, QueryParameter(ge=0)] = None,
) -> Response[bytes]:
    """Show the newest turns, or those at a position. The form for jumping sends `jump`."""
    if sum(seq is not None for seq in (after, before, around)) > 1:
        raise refuse("around", "Expected one of `after`, `before` and `around`", source="query")
    timeline = await inspector.load_timeline(
        session.tenant_scope,
        conversation_id,
        after_seq=after,
        before_seq=before,
        around_seq=around if jump is None else jump,
        limit=_TURNS,
    )
    page = f"/admin/conversations/{timeline.conversation.id}"
    if jump is not None:
        # A form cannot set the fragment of the URL, which scrolls to the turn.
        return answer_redirect(f"{page}?around={jump}#turn-{min(max(jump, 1), timeline.last_seq)}")
    budget = PageBudget(PAGE_BYTES, min_bytes=MIN_BYTES)
    # Before the turns, so that long turns do not use up the budget.
    values = _show_values(timeline.conversation, budget)
    return answer_page(
        request,
        "conversation.html",
        url=page,
        timeline=timeline,
        conversation=timeline.conversation,
        facts=timeline.facts,
        turns=[show_turn(item, budget) for item in timeline.turns],
        values=values,
        epoch_labels=EPOCH_LABELS,
        usage_share=_share_cache(timeline),
        flags=_name_flags(timeline),
        around=around,
        is_newest=timeline.later_seq is None,
        shows_tenant=session.tenant_scope is None,
    )


def _show_values(conversation: Conversation, budget: PageBudget) -> Sequence[tuple[str, str, Excerpt]]:
    """The current args, context and metadata of the conversation."""
    given: Sequence[tuple[str, str, JsonValue]] = (
        ("args", "Args", conversation.args),
        ("context", "Context", conversation.context),
        ("metadata", "Metadata", conversation.metadata),
    )
    return [
        (name, label, budget.fit(excerpt_value(value, limit=_VALUE_BYTES), _VALUE_BYTES))
        for name, label, value in given
        if value
    ]


def _share_cache(timeline: Timeline) -> float | None:
    """The share of input tokens that was read from the cache. None if nothing is counted."""
    usage = timeline.facts.usage if timeline.facts else Usage()
    return usage.cache_read_tokens / usage.input_tokens if usage.input_tokens else None


def _name_flags(timeline: Timeline) -> Sequence[str]:
    return [label for name, label in FLAGS.items() if timeline.facts is not None and getattr(timeline.facts, name)]
