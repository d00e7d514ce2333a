"""The page of a conversation: a part of its timeline and its totals.

The page loads complete texts, images and the events of a running turn from routes of their own.
"""

import json
import re
import time
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation
from server.conversation.errors import ConversationNotFound, ImageNotFound, RouteNotFound, TurnNotFound
from server.conversation.event import TurnEvent
from server.conversation.image import IMAGE_TYPES
from server.conversation.store import Store
from server.conversation.turn import ModelResponseTurn, Turn
from server.conversation.usage import Usage
from server.inspection.admin_sessions import AdminSession
from server.inspection.excerpts import Excerpt, excerpt_value
from server.inspection.port import Inspector
from server.inspection.timeline import Timeline
from server.turns.handle import EventReader
from server.turns.service import TurnService
from server.web.admin.conversation_filters import FLAGS
from server.web.admin.labels import EPOCH_LABELS
from server.web.admin.page_budget import PageBudget
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.shown_turns import MIN_BYTES, PAGE_BYTES, content_of, show_turn
from server.web.api.images import answer_image, load_image
from server.web.api.turns import TurnOptions
from server.web.headers import LastEventId, read_last_event_id
from server.web.request import StrataRequest
from server.web.sse import TurnStream
from server.web.validation import refuse

_TURNS: Final = 40
_VALUE_BYTES: Final = 4_000
_LISTEN_SECONDS: Final = 60.0
_INDEX: Final = re.compile(r"[0-9]{1,6}")
_MAX_INDENTED: Final = 8 * 1024 * 1024


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


async def provide_owner(
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> str:
    """Return the tenant of the conversation. Raises `ConversationNotFound`, also if the session may not see it."""
    owner = await inspector.find_tenant(conversation_id)
    if owner is None or session.tenant_scope not in {None, owner}:
        raise ConversationNotFound
    return owner


_OWNER: Final = {"owner": Provide(provide_owner)}


class BriefReader:
    """An `EventReader` that ends after some time. The browser reconnects with the id of the last event, and its session
    is checked again.
    """

    def __init__(self, reader: EventReader, *, seconds: float) -> None:
        self._reader = reader
        self._ends_at = time.monotonic() + seconds

    @property
    def encodings(self) -> MutableMapping[int, bytes]:
        return self._reader.encodings

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        if time.monotonic() >= self._ends_at:
            return None
        return await self._reader.next(limit_seconds)

    def close(self) -> None:
        self._reader.close()


@get("/conversations/{conversation_id:str}/turns/{seq:int}/events", dependencies=_OWNER)
async def follow_turn_on_page(
    conversation_id: FromPath[str],
    seq: FromPath[int],
    owner: NamedDependency[SkipValidation[str]],
    turn_service: NamedDependency[SkipValidation[TurnService]],
    turn_options: NamedDependency[SkipValidation[TurnOptions]],
    after: Annotated[int | None, QueryParameter(ge=0)] = None,
    last_event_id: LastEventId = None,
) -> Response[bytes]:
    """Stream the events of a turn, as clients receive them."""
    handle = await turn_service.follow_turn(owner, conversation_id, seq)
    reader = BriefReader(handle.read(read_last_event_id(last_event_id, after)), seconds=_LISTEN_SECONDS)
    return TurnStream(reader, turn_options.stream, headers={})


@get("/conversations/{conversation_id:str}/images/{sha256:str}", dependencies=_OWNER)
async def show_image_on_page(
    conversation_id: FromPath[str],
    sha256: FromPath[str],
    owner: NamedDependency[SkipValidation[str]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    """Answer with an image. Opened by itself, it is sandboxed."""
    blob = await load_image(store, owner, conversation_id, sha256)
    if blob.media_type not in IMAGE_TYPES:
        raise ImageNotFound
    return answer_image(
        blob, {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
    )


@get("/conversations/{conversation_id:str}/whole/{name:str}", dependencies=_OWNER)
async def show_whole_value(
    conversation_id: FromPath[str],
    name: FromPath[str],
    owner: NamedDependency[SkipValidation[str]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    """Download the current args, context or metadata of the conversation."""
    conversation = await store.load_conversation(owner, conversation_id)
    values = {"args": conversation.args, "context": conversation.context, "metadata": conversation.metadata}
    if name not in values:
        raise RouteNotFound
    return _answer_text(values[name], name)


@get("/conversations/{conversation_id:str}/turns/{seq:int}/whole/{name:str}", dependencies=_OWNER)
async def show_whole_piece(
    conversation_id: FromPath[str],
    seq: FromPath[int],
    name: FromPath[str],
    owner: NamedDependency[SkipValidation[str]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    """Download a block of a turn by its index, its args, the conversation's args, or its context."""
    if name in {"context", "conversation_args"}:
        turns = (await inspector.load_timeline(owner, conversation_id, after_seq=seq - 1, limit=1)).turns
        if not turns or turns[0].turn.seq != seq:
            raise TurnNotFound
        value = turns[0].context if name == "context" else dict(turns[0].conversation_args or {})
        return _answer_text(value or "", f"turn-{seq}-{name}")
    turn = await store.load_turn(owner, conversation_id, seq)
    return _answer_text(_find_content(turn, name), f"turn-{seq}-{name}")


def _find_content(turn: Turn, name: str) -> JsonValue:
    if name == "args" and not isinstance(turn, ModelResponseTurn) and turn.args is not None:
        return turn.args
    if _INDEX.fullmatch(name) is None or int(name) >= len(turn.blocks):
        raise TurnNotFound("The turn has no such part.", hint="Follow a link from the conversation's page.")
    return content_of(turn.blocks[int(name)])


def _answer_text(value: JsonValue, name: str) -> Response[bytes]:
    """Answer with a download that no browser shows as a page. Lone surrogates are replaced."""
    return Response(
        content=render_whole(value).encode("utf-8", "replace"),
        headers={
            "content-type": "text/plain; charset=utf-8",
            "content-disposition": f'attachment; filename="{name}.txt"',
            "content-security-policy": "default-src 'none'; sandbox",
        },
    )


def render_whole(value: JsonValue) -> str:
    """Render a text as it is and another value as JSON, indented unless it is nested too deeply."""
    if isinstance(value, str):
        return value
    indented = _join(json.JSONEncoder(ensure_ascii=False, indent=2).iterencode(value), _MAX_INDENTED)
    return json.dumps(value, ensure_ascii=False) if indented is None else indented


def _join(parts: Iterable[str], limit: int) -> str | None:
    """Join the parts. None if they are longer than `limit`."""
    taken, length = [], 0
    for part in parts:
        length += len(part)
        if length > limit:
            return None
        taken.append(part)
    return "".join(taken)
