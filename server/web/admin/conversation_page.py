"""One conversation as it went: what was said, what was called, what went wrong, and what it took."""

from collections.abc import Sequence
from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation
from server.conversation.usage import Usage
from server.inspection.admin_sessions import AdminSession
from server.inspection.port import Inspector, Timeline
from server.inspection.timeline import tell_timeline
from server.web.admin.conversation_filters import FLAGS
from server.web.admin.labels import EPOCH_LABELS
from server.web.admin.pieces import Allowance, Piece
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.shown_turns import show_turn
from server.web.request import StrataRequest
from server.web.validation import refuse

_TURNS: Final = 40
_VALUE_LETTERS: Final = 4_000


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
    """A part of it: the newest turns, or those at a place. `jump` is what the form for it sends."""
    if sum(place is not None for place in (after, before, around)) > 1:
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
        # A form cannot name the turn to scroll to; an address can.
        return answer_redirect(f"{page}?around={jump}#turn-{min(max(jump, 1), timeline.last_seq)}")
    allowance = Allowance()
    told = tell_timeline(timeline)
    # First: what the conversation has now matters more than what was said in it at length.
    values = _show_values(timeline.conversation, allowance)
    return answer_page(
        request,
        "conversation.html",
        url=page,
        timeline=timeline,
        conversation=timeline.conversation,
        facts=timeline.facts,
        told=told,
        turns=[show_turn(item, allowance) for item in told.turns],
        values=values,
        epoch_words=EPOCH_LABELS,
        usage_share=_share_cache(timeline),
        flags=_name_flags(timeline),
        around=around,
        is_newest=timeline.later_seq is None,
        shows_tenant=session.tenant_scope is None,
    )


def _show_values(conversation: Conversation, allowance: Allowance) -> Sequence[tuple[str, str, Piece]]:
    """What the application has given to the conversation, as it is now."""
    given: Sequence[tuple[str, str, JsonValue]] = (
        ("args", "Args", conversation.args),
        ("context", "Context", conversation.context),
        ("metadata", "Metadata", conversation.metadata),
    )
    return [(name, label, allowance.take_json(value, _VALUE_LETTERS)) for name, label, value in given if value]


def _share_cache(timeline: Timeline) -> float | None:
    """How much of all input came from the cache; None where nothing is counted."""
    usage = timeline.facts.usage if timeline.facts else Usage()
    return usage.cache_read_tokens / usage.input_tokens if usage.input_tokens else None


def _name_flags(timeline: Timeline) -> Sequence[str]:
    """What an operator should know of the conversation."""
    return [label for name, label in FLAGS.items() if timeline.facts is not None and getattr(timeline.facts, name)]
