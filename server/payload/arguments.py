"""Prompt arguments: what templates can speak of.

    system          the clock, in UTC                                       dynamic layer only
    message         the text and language of the newest user task           dynamic layer only
    assistant       name, id, language, description
    conversation    id, identifier, source, direction, created_date; updated_date and duration in the dynamic layer only
    session         mode; empty if the conversation has none
    args            the conversation's args, with those of the turn over them in the dynamic layer
    <any name>      every arg again, and the assistant's variables where no arg has their name

The names of the namespaces are taken, whether or not they are there: no arg and no variable is ever seen under one.
What comes out shares nothing with what went in.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Final

from server.conversation.assistant import Assistant
from server.conversation.block import JsonValue, TextBlock
from server.conversation.conversation import Conversation
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind

NAMESPACES: Final = frozenset({"system", "assistant", "conversation", "session", "message", "args"})
_WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def build_arguments(
    *,
    assistant: Assistant,
    conversation: Conversation,
    now: datetime,
    message_text: str,
    message_language: str,
    turn_args: Mapping[str, JsonValue] | None,
) -> dict[str, JsonValue]:
    """For the dynamic layer: all there is. The turn's args win over the conversation's, and those over variables."""
    named = _named(assistant, conversation, {**conversation.args, **(turn_args or {})})
    named["conversation"] |= {
        "updated_date": _rfc3339(conversation.updated_at),
        # Two clocks may disagree, but nothing lasts less than no time.
        "duration": max(0, (now - conversation.created_at) // timedelta(seconds=1)),
    }
    return named | {
        "system": _system(now.astimezone(UTC)),
        "message": {"text": message_text, "language": message_language},
    }


def build_static_arguments(*, assistant: Assistant, conversation: Conversation) -> dict[str, JsonValue]:
    """For the static layer: the same without what depends on the clock, the message or the turn."""
    return _named(assistant, conversation, conversation.args)


def hash_arguments(args: Mapping[str, JsonValue]) -> bytes:
    """SHA-256 of the args, whatever the order of their keys. Args that could render differently hash differently."""
    text = json.dumps(clone(args), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def choose_language(turns: Sequence[BufferedTurn], metadata: Mapping[str, JsonValue]) -> str:
    """The language of the newest user task, else the client's, else none.

    The client's stands in the metadata as `client.language`, under that very key or as `language` within `client`.
    """
    task = _find_newest_task(turns)
    client = metadata.get("client")
    nested = client.get("language") if isinstance(client, Mapping) else None
    found = (task.language if task is not None else None, metadata.get("client.language"), nested)
    return next((language for language in found if isinstance(language, str) and language), "")


def latest_user_text(turns: Sequence[BufferedTurn]) -> str:
    """What the user said last, also where tool responses came since; images and the like are left out."""
    task = _find_newest_task(turns)
    blocks = (task.blocks if task is not None else None) or ()
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def clone(value: JsonValue) -> JsonValue:
    """A copy that shares nothing that could be changed with its original: plain dicts and lists throughout."""
    match value:
        case dict() | Mapping():
            return {key: clone(inner) for key, inner in value.items()}
        case list() | tuple():
            return [clone(inner) for inner in value]
        case _:
            return value


def _find_newest_task(turns: Sequence[BufferedTurn]) -> BufferedTurn | None:
    return next((turn for turn in reversed(turns) if turn.kind is TurnKind.USER_TASK), None)


def _named(assistant: Assistant, conversation: Conversation, args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    root = {name: clone(value) for name, value in {**assistant.definition.variables, **args}.items()}
    return {
        **{name: value for name, value in root.items() if name not in NAMESPACES},
        "assistant": {
            "name": assistant.definition.name,
            "id": assistant.id,
            "language": assistant.definition.language,
            "description": assistant.definition.description,
        },
        "conversation": {
            "id": conversation.id,
            "identifier": conversation.identifier or "",
            "source": conversation.source or "",
            "direction": conversation.direction or "",
            "created_date": _rfc3339(conversation.created_at),
        },
        # Without a mode it is empty but there: `session.mode` is then undefined, which renders as an empty text.
        "session": {"mode": conversation.mode} if conversation.mode else {},
        "args": clone(args),
    }


def _system(now: datetime) -> dict[str, JsonValue]:
    since = now - _UNIX_EPOCH
    return {
        "current_date": now.date().isoformat(),
        "current_time": now.time().isoformat("seconds"),
        "current_datetime": _rfc3339(now),
        "day_of_week": _WEEKDAYS[now.weekday()],
        "date_rfc1123": format_datetime(now, usegmt=True),
        "date_unix": since // timedelta(seconds=1),
        "date_unix_ms": since // timedelta(milliseconds=1),
    }


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"
