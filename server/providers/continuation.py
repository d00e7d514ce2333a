"""Answers that took more than one call: the provider paused, and its output was sent back so that it continues.

A paused answer and the calls that continue it are one turn. Each call has its own row and its own raw bytes. The turn's
content and its events are one fold over the bytes of all of them, in order, so they are the same live, in another
process, after a crash, and when verified. A call that continues says so in a note among its warnings.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import CallStart
from server.conversation.errors import ProviderFailed
from server.conversation.event import ProviderEvent
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.providers.provider import Fold

CONTINUATION: Final = "continuation"
"""The `kind` of the note."""
CONTAINER: Final = "container"
"""The `kind` of the note about a container."""
_log = logging.getLogger("strata.turn")


def continue_payload(
    payload: Payload, message: bytes, attempts: Sequence[int], *, container: str | None = None
) -> Payload:
    """The request that continues an answer: the same as before, and last what the model has said so far.

    `message`: of all attempts that the answer took so far, whose numbers are `attempts`. `container`: the one that they
    ran in, if it is another than the request named.
    """
    asked = tuple(each for each in payload.messages if not each.is_continuation)
    said = PayloadMessage(layer=Layer.TRIGGER, data=message, role="model", is_continuation=True)
    return replace(
        payload,
        messages=(*asked, said),
        continues=tuple(attempts),
        container=payload.container if container is None else container,
    )


def note_continuation(payload: Payload) -> tuple[dict[str, JsonValue], ...]:
    """What the call of a payload records: the attempts that it continues. Nothing for one that continues none."""
    return ({"kind": CONTINUATION, "attempts": list(payload.continues)},) if payload.continues else ()


def continued_attempts(start: CallStart) -> tuple[int, ...]:
    """The attempts of the same turn that a call continues, in order. Empty for one that continues none."""
    notes = (warning for warning in start.warnings if warning.get("kind") == CONTINUATION)
    return tuple(int(attempt) for note in notes for attempt in note["attempts"])


def note_container(payload: Payload, container: Mapping[str, JsonValue] | None) -> tuple[dict[str, JsonValue], ...]:
    """What a call records of the container that later calls may name: the answer's, or that of the paused one.

    It precedes the note that a turn copies from the previous one: the first note is used.
    """
    if container is not None:
        return ({"kind": CONTAINER, **container},)
    is_new = payload.container is not None and payload.continues
    return ({"kind": CONTAINER, "id": payload.container},) if is_new else ()


def replace_container(start: CallStart, container: Mapping[str, JsonValue]) -> CallStart:
    """The call with a note about this container, in place of any other."""
    others = [warning for warning in start.warnings if warning.get("kind") != CONTAINER]
    return replace(start, warnings=(*others, {"kind": CONTAINER, **container}))


def choose_container(noted: Mapping[str, JsonValue] | None, now: datetime, *, in_loop: bool) -> str | None:
    """The container that a turn's request names, given the note of the call before; None if it names none.

    Within a tool loop code may wait in it for results. Elsewhere one that has expired must not be named.
    """
    if noted is None or not isinstance(noted.get("id"), str):
        return None
    try:
        expires_at = datetime.fromisoformat(str(noted.get("expires_at")))
    except ValueError:
        is_alive = False
    else:
        is_alive = expires_at.tzinfo is not None and expires_at > now
    return str(noted["id"]) if in_loop or is_alive else None


def fold_earlier(fold: Fold, bodies: Iterable[bytes]) -> list[ProviderEvent]:
    """Folds the bytes of the calls that another one has continued; the fold is ready for the bytes of that one.

    Gives their events.
    """
    events: list[ProviderEvent] = []
    for body in bodies:
        events += fold_events(fold, body)[0]
        fold.continue_answer()
    return events


def fold_events(fold: Fold, piece: bytes) -> tuple[list[ProviderEvent], bool]:
    """The events that a piece completes, and whether the fold can continue after it."""
    events: list[ProviderEvent] = []
    try:
        events.extend(fold.feed(piece))
    except ProviderFailed:
        # A generator that raises has given what came before; `extend` has taken it.
        return events, False
    # Stored bytes are read again and again: by listeners, by recovery, by operators. None of them may fail forever
    # over bytes that a fold has a bug with.
    except Exception:  # noqa: BLE001  reason: logged with its traceback, and the stream ends there
        _log.exception("fold.crashed", extra={"provider_fold": type(fold).__module__})
        return events, False
    return events, True
