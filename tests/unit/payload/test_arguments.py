"""The names that templates can use: every namespace, its members, and their precedence."""

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.assistant import Assistant
from server.conversation.block import Block, ImageBlock, TextBlock, ToolResultBlock
from server.conversation.conversation import Conversation, ConversationState
from server.conversation.store import BufferedTurn
from server.conversation.turn import STRATA_DIALECT, Native, TurnKind, TurnState
from server.payload.arguments import (
    NAMESPACES,
    build_arguments,
    build_static_arguments,
    choose_language,
    hash_arguments,
    latest_user_text,
)
from tests.support.builders import A_TIME, definition
from tests.support.strategies import any_text, json_objects, json_values

NOW = A_TIME
CREATED = A_TIME - timedelta(seconds=90, microseconds=7)

names = st.sampled_from(sorted(NAMESPACES)) | st.sampled_from(["tone", "name", "items", "self", ""]) | any_text
named_values = st.dictionaries(names, json_values, max_size=6)


def an_assistant(**changes: Any) -> Assistant:
    return Assistant(id="asst_1", version=1, created_at=A_TIME, definition=definition(**changes))


def a_conversation(**changes: Any) -> Conversation:
    values: dict[str, Any] = {
        "id": "conv_1",
        "assistant_id": "asst_1",
        "assistant_version": 1,
        "revision": 3,
        "next_seq": 3,
        "buffer_start_seq": 1,
        "epoch": 1,
        "state": ConversationState.RUNNING,
        "pending_call_ids": (),
        "pending_calls": (),
        "identifier": "+47 1",
        "source": "phone",
        "direction": "inbound",
        "mode": None,
        "args": {},
        "context": {},
        "metadata": {},
        "forked_from": None,
        "created_at": CREATED,
        "updated_at": A_TIME - timedelta(seconds=5),
    }
    return Conversation(**values | changes)


def arguments(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "assistant": an_assistant(),
        "conversation": a_conversation(),
        "now": NOW,
        "message_text": "Hi",
        "message_language": "no",
        "turn_args": None,
    }
    return build_arguments(**values | changes)


def static_arguments(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"assistant": an_assistant(), "conversation": a_conversation()}
    return build_static_arguments(**values | changes)


def a_turn(seq: int, kind: TurnKind, *blocks: Block, language: str | None = None) -> BufferedTurn:
    return BufferedTurn(
        seq=seq,
        kind=kind,
        state=TurnState.COMPLETE,
        native=Native(dialect=STRATA_DIALECT, data=b"[]"),
        blocks=None if kind is TurnKind.MODEL_RESPONSE else blocks,
        provider=None,
        model=None,
        account=None,
        prefix_hash=None,
        dynamic=None,
        language=language,
        args=None,
    )


# --- namespaces


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("current_date", "2026-11-16"),
        ("current_time", "12:00:00"),
        ("current_datetime", "2026-11-16T12:00:00Z"),
        ("day_of_week", "Monday"),
        ("date_rfc1123", "Mon, 16 Nov 2026 12:00:00 GMT"),
        ("date_unix", 1794830400),
        ("date_unix_ms", 1794830400123),
    ],
)
def test_system_has_the_time(member: str, value: object) -> None:
    assert arguments()["system"][member] == value


def test_system_has_nothing_else() -> None:
    assert len(arguments()["system"]) == 7


@pytest.mark.parametrize("hours", [-11, 0, 5.5, 14])
def test_system_is_in_utc_in_any_time_zone(hours: float) -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=hours)))

    assert arguments(now=elsewhere) == arguments()


@given(st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001  reason: bounds of a strategy are naive
def test_all_members_of_system_are_of_one_moment(now: datetime) -> None:
    system = arguments(now=now)["system"]

    assert datetime.fromisoformat(system["current_datetime"]) == now.replace(microsecond=0)
    assert f"{system['current_date']}T{system['current_time']}Z" == system["current_datetime"]
    assert datetime.strptime(system["date_rfc1123"], "%a, %d %b %Y %H:%M:%S %Z").replace(tzinfo=UTC) == now.replace(
        microsecond=0
    )
    assert system["date_rfc1123"].startswith(system["day_of_week"][:3])
    assert datetime.fromtimestamp(system["date_unix"], UTC) == now.replace(microsecond=0)
    assert system["date_unix_ms"] == system["date_unix"] * 1000 + now.microsecond // 1000


def test_assistant_is_described() -> None:
    assert arguments()["assistant"] == {
        "name": "helper",
        "id": "asst_1",
        "language": "en",
        "description": "Helps.",
    }


def test_conversation_is_described() -> None:
    assert arguments()["conversation"] == {
        "id": "conv_1",
        "identifier": "+47 1",
        "source": "phone",
        "direction": "inbound",
        "created_date": "2026-11-16T11:58:30Z",
        "updated_date": "2026-11-16T11:59:55Z",
        "duration": 90,
    }


def test_missing_parts_of_a_conversation_are_empty() -> None:
    bare = arguments(conversation=a_conversation(identifier=None, source=None, direction=None))["conversation"]

    assert (bare["identifier"], bare["source"], bare["direction"]) == ("", "", "")


def test_a_conversation_created_in_the_future_has_no_duration() -> None:
    ahead = a_conversation(created_at=NOW + timedelta(seconds=2))

    assert arguments(conversation=ahead)["conversation"]["duration"] == 0


def test_session_has_the_mode() -> None:
    assert arguments(conversation=a_conversation(mode="voice"))["session"] == {"mode": "voice"}


@pytest.mark.parametrize("mode", [None, ""])
def test_session_is_empty_without_a_mode(mode: str | None) -> None:
    assert arguments(conversation=a_conversation(mode=mode))["session"] == {}


def test_no_arg_can_replace_the_session() -> None:
    pretender = a_conversation(mode=None, args={"session": {"mode": "admin"}})

    assert arguments(conversation=pretender)["session"] == {}


def test_message_is_the_text_of_the_user() -> None:
    assert arguments()["message"] == {"text": "Hi", "language": "no"}


# --- args and variables


def test_args_are_there_under_their_namespace_and_at_the_root() -> None:
    given_args = arguments(conversation=a_conversation(args={"name": "Kari"}))

    assert given_args["args"] == {"name": "Kari"}
    assert given_args["name"] == "Kari"


def test_variables_are_defaults_at_the_root_only() -> None:
    given_args = arguments()

    assert given_args["tone"] == "friendly"
    assert given_args["args"] == {}


@pytest.mark.parametrize(
    ("conversation_args", "turn_args", "at_the_root", "in_args"),
    [
        ({}, None, "variable", {}),
        ({"tone": "conversation"}, None, "conversation", {"tone": "conversation"}),
        ({"tone": "conversation"}, {"tone": "turn"}, "turn", {"tone": "turn"}),
        ({}, {"tone": "turn"}, "turn", {"tone": "turn"}),
        ({"tone": None}, None, None, {"tone": None}),
    ],
    ids=["variable", "conversation", "turn over both", "turn over variable", "null is a value"],
)
def test_the_most_specific_value_wins(
    conversation_args: Mapping[str, Any], turn_args: Mapping[str, Any] | None, at_the_root: object, in_args: object
) -> None:
    given_args = arguments(
        assistant=an_assistant(variables={"tone": "variable"}),
        conversation=a_conversation(args=conversation_args),
        turn_args=turn_args,
    )

    assert given_args["tone"] == at_the_root
    assert given_args["args"] == in_args


@given(variables=named_values, args=named_values, turn_args=st.none() | named_values)
def test_every_name_has_the_value_of_its_first_source(
    variables: dict[str, Any], args: dict[str, Any], turn_args: dict[str, Any] | None
) -> None:
    given_args = arguments(
        assistant=an_assistant(variables=variables), conversation=a_conversation(args=args), turn_args=turn_args
    )

    assert given_args["args"] == args | (turn_args or {})
    for name in {*variables, *args, *(turn_args or {})} - NAMESPACES:
        winner = next(source for source in (turn_args or {}, args, variables) if name in source)
        assert given_args[name] == winner[name]


@given(variables=named_values, args=named_values, turn_args=named_values)
def test_no_namespace_is_hidden_by_an_arg(
    variables: dict[str, Any], args: dict[str, Any], turn_args: dict[str, Any]
) -> None:
    given_args = arguments(
        assistant=an_assistant(variables=variables), conversation=a_conversation(args=args), turn_args=turn_args
    )
    plain = arguments()

    for name in NAMESPACES - {"args"}:
        assert given_args.get(name) == plain.get(name)


@given(variables=json_objects, args=json_objects, turn_args=json_objects)
def test_the_result_shares_no_object_with_its_sources(
    variables: dict[str, Any], args: dict[str, Any], turn_args: dict[str, Any]
) -> None:
    before = deepcopy((variables, args, turn_args))

    spoil(
        arguments(
            assistant=an_assistant(variables=variables), conversation=a_conversation(args=args), turn_args=turn_args
        )
    )

    assert (variables, args, turn_args) == before


def test_an_arg_and_its_namespaced_copy_share_no_object() -> None:
    given_args = arguments(conversation=a_conversation(args={"list": [1]}))
    given_args["list"].append(2)

    assert given_args["args"]["list"] == [1]


def test_mappings_of_any_kind_become_plain_ones() -> None:
    frozen = MappingProxyType({"a": MappingProxyType({"b": (1, 2)})})

    assert arguments(conversation=a_conversation(args=frozen))["a"] == {"b": [1, 2]}


def spoil(value: Any) -> None:
    """Change everything in a value that can be changed."""
    if isinstance(value, dict):
        for inner in list(value.values()):
            spoil(inner)
        value["spoilt"] = True
    elif isinstance(value, list):
        for inner in value:
            spoil(inner)
        value.append("spoilt")


# --- the static layer


def test_static_arguments_depend_on_neither_clock_nor_message() -> None:
    given_args = static_arguments(conversation=a_conversation(mode="voice", args={"name": "Kari"}))

    assert given_args == {
        "tone": "friendly",
        "name": "Kari",
        "assistant": {"name": "helper", "id": "asst_1", "language": "en", "description": "Helps."},
        "conversation": {
            "id": "conv_1",
            "identifier": "+47 1",
            "source": "phone",
            "direction": "inbound",
            "created_date": "2026-11-16T11:58:30Z",
        },
        "session": {"mode": "voice"},
        "args": {"name": "Kari"},
    }


def test_static_arguments_stay_the_same_when_a_conversation_continues() -> None:
    conversation = a_conversation()
    later = replace(conversation, updated_at=NOW + timedelta(days=1), revision=9, next_seq=9)

    assert static_arguments(conversation=later) == static_arguments(conversation=conversation)


@given(named_values)
def test_static_arguments_take_no_volatile_name_from_an_arg(args: dict[str, Any]) -> None:
    given_args = static_arguments(conversation=a_conversation(args=args))

    assert not {"system", "message"} & given_args.keys()
    assert given_args["session"] == {}


# --- their hash


@given(json_objects)
def test_the_order_of_keys_does_not_change_the_hash(args: dict[str, Any]) -> None:
    backwards = dict(reversed(args.items()))

    assert hash_arguments(backwards) == hash_arguments(args)
    assert len(hash_arguments(args)) == 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"a": None}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": "\ud83d\ude00"}, {"a": "😀"}),
        ({"a": "\x00"}, {"a": ""}),
    ],
    ids=["null", "float", "bool", "text", "order of a list", "halves of a character", "nul"],
)
def test_args_that_render_differently_hash_differently(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert hash_arguments(one) != hash_arguments(other)


def test_the_hash_is_of_canonical_json() -> None:
    assert hash_arguments({"b": [1], "a": "é"}) == hashlib.sha256('{"a":"é","b":[1]}'.encode()).digest()


# --- language and text of the message

USER = TurnKind.USER_TASK
MODEL = TurnKind.MODEL_RESPONSE
TOOLS = TurnKind.TOOL_RESPONSE


@pytest.mark.parametrize(
    ("latest", "metadata", "language"),
    [
        ("no", {"client.language": "de"}, "no"),
        (None, {"client.language": "de"}, "de"),
        ("", {"client.language": "de"}, "de"),
        (None, {"client": {"language": "fr"}}, "fr"),
        (None, {"client.language": "de", "client": {"language": "fr"}}, "de"),
        (None, {"client.language": "", "client": {"language": "fr"}}, "fr"),
        (None, {"client.language": 7, "client": "x"}, ""),
        (None, {}, ""),
    ],
    ids=[
        "the turn's",
        "the client's",
        "an empty one is none",
        "nested",
        "flat before nested",
        "empty flat",
        "no text",
        "none",
    ],
)
def test_the_language_is_that_of_the_latest_user_turn_or_of_the_client(
    latest: str | None, metadata: Mapping[str, Any], language: str
) -> None:
    turns = [a_turn(1, USER, language="en"), a_turn(2, MODEL), a_turn(3, USER, language=latest)]

    assert choose_language(turns, metadata) == language


def test_the_language_of_the_task_applies_while_tools_answer() -> None:
    turns = [a_turn(1, USER, language="no"), a_turn(2, MODEL), a_turn(3, TOOLS)]

    assert choose_language(turns, {"client.language": "de"}) == "no"


def test_without_any_turn_the_language_is_that_of_the_client() -> None:
    assert choose_language([], {"client.language": "de"}) == "de"


def test_the_message_is_the_latest_task_also_while_tools_answer() -> None:
    turns = [
        a_turn(1, USER, TextBlock(text="first")),
        a_turn(2, MODEL),
        a_turn(3, USER, TextBlock(text="What is"), image(), TextBlock(text="this?")),
        a_turn(4, MODEL),
        a_turn(5, TOOLS, ToolResultBlock(tool_call_id="call_1", output="a cat")),
    ]

    assert latest_user_text(turns) == "What is\nthis?"


def test_without_text_the_message_is_empty() -> None:
    assert latest_user_text([]) == ""
    assert latest_user_text([a_turn(1, USER, image())]) == ""


def image() -> ImageBlock:
    return ImageBlock(media_type="image/png", sha256="00" * 32, size_bytes=1)
