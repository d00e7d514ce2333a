import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation import redaction
from server.conversation.api_key import issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from server.conversation.redaction import redact_text


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
def test_a_key_is_redacted_at_any_position(before: str, after: str) -> None:
    key = issue_key_text(new_id(API_KEY))
    left = redact_text(before + key + after)
    assert key.split("_")[2] not in left
    assert key.split("_")[1] in left


@given(text=st.text(st.sampled_from("strata_:/bearekyAIz=sk-@ 0123456789abcdefghjkmnpqrs"), max_size=80))
def test_the_fast_check_never_misses_what_the_full_one_finds(text: str) -> None:
    if redaction._SECRET_TEXT.search(text):  # noqa: SLF001
        assert any(sign in text.lower() for sign in redaction._SUSPICIOUS)  # noqa: SLF001
