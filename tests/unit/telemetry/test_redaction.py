import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.api_key import issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from server.telemetry import redaction
from server.telemetry.redaction import REDACTED, redact_event, redact_text


def redact(**fields: object) -> dict[str, object]:
    return redact_event(None, "info", fields)


@pytest.mark.parametrize(
    "name",
    ["authorization", "Authorization", "cookie", "set-cookie", "api_key", "x-api-key", "apikey", "password",
     "db_password", "client_secret", "secret", "token", "access_token", "credentials", "database_url"],
)  # fmt: skip
def test_fields_with_a_telling_name_are_dropped(name: str) -> None:
    assert redact(**{name: "abc"}) == {name: REDACTED}
    assert redact(nested={"list": [{name: ["abc"]}]}) == {"nested": {"list": [{name: REDACTED}]}}
    assert redact(**{name: None}) == {name: None}


@pytest.mark.parametrize(
    "name", ["input_tokens", "api_key_id", "key_id", "tokens", "cache_read_tokens", "author", "event", "token_count"]
)
def test_fields_that_only_look_like_it_are_kept(name: str) -> None:
    assert redact(**{name: "abc"}) == {name: "abc"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("postgresql://user:p4ss@db:5432/x failed", "postgresql://user:[redacted]@db:5432/x failed"),
        ("postgres://:p4ss@db", "postgres://:[redacted]@db"),
        ("https://u:p%40@h/?a=1", "https://u:[redacted]@h/?a=1"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer [redacted]"),
        ("authorization: basic dXNlcjpwYXNz", "authorization: basic [redacted]"),
        ("host=db password=hunter2 user=x", "host=db password=[redacted] user=x"),
        ("https://x/v1?key=AIzaSyA-1234567890123456&alt=sse", "https://x/v1?key=[redacted]&alt=sse"),
        ("bad key sk-ant-api03-abcdefghijklmnop", "bad key sk-ant-[redacted]"),
        ("GET http://127.0.0.1:8400/healthz", "GET http://127.0.0.1:8400/healthz"),
        ("conv_01jd0z8s3bf6h9kq2m4n6p8r0t", "conv_01jd0z8s3bf6h9kq2m4n6p8r0t"),
        ("monkey=1", "monkey=1"),
    ],
)
def test_secrets_inside_a_text_are_replaced(text: str, left: str) -> None:
    assert redact_text(text) == left


@given(before=st.text(max_size=20), after=st.text(max_size=20))
def test_a_key_never_gets_through_wherever_it_stands(before: str, after: str) -> None:
    key = issue_key_text(new_id(API_KEY))
    left = redact_text(before + key + after)
    assert key.split("_")[2] not in left
    assert key.split("_")[1] in left


@given(text=st.text(st.sampled_from("strata_:/bearekyAIz=sk-@ 0123456789abcdefghjkmnpqrs"), max_size=80))
def test_the_quick_look_never_misses_what_the_long_one_finds(text: str) -> None:
    if redaction._SECRET_TEXT.search(text):  # noqa: SLF001
        assert any(sign in text.lower() for sign in redaction._SUSPICIOUS)  # noqa: SLF001


def test_other_values_become_something_that_can_be_written() -> None:
    class Thing:
        def __str__(self) -> str:
            return "password=hunter2"

    deep: object = "end"
    for _ in range(20):
        deep = [deep]
    left = redact(thing=Thing(), data=b"abc", kinds={"a"}, deep=deep, flag=True, ratio=0.5)
    assert left["thing"] == "password=[redacted]"
    assert left["data"] == "[3 bytes]"
    assert left["kinds"] == ["a"]
    assert (left["flag"], left["ratio"]) == (True, 0.5)
    assert re.search(r"too deep", str(left["deep"]))
