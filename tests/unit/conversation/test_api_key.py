"""Keys are parsed strictly, compared by hash, and expire on time."""

from datetime import UTC, datetime, timedelta

import pytest

from server.conversation.api_key import ApiKey, Scope, issue_key_text, parse_key_text
from server.conversation.identifiers import API_KEY, new_id

NOW = datetime(2026, 11, 16, tzinfo=UTC)


def test_a_key_names_its_row_and_matches_its_own_hash_only() -> None:
    key_id = new_id(API_KEY)
    presented = parse_key_text(issue_key_text(key_id))
    other = parse_key_text(issue_key_text(key_id))
    assert presented is not None
    assert other is not None
    assert presented.id == key_id
    assert presented.matches(presented.secret_hash)
    assert not presented.matches(other.secret_hash)


def test_the_hash_does_not_contain_the_secret() -> None:
    text = issue_key_text(new_id(API_KEY))
    presented = parse_key_text(text)
    assert presented is not None
    assert text.rpartition("_")[2].encode() not in presented.secret_hash
    assert text.rpartition("_")[2] not in repr(presented)


@pytest.mark.parametrize(
    "text",
    ["", "strata", "strata_", "strata__", "sk-123", "strata_x_y", "strata_" + "0" * 26 + "_short", "Bearer strata_a_b"],
)
def test_what_cannot_be_a_key_is_none(text: str) -> None:
    assert parse_key_text(text) is None


def test_a_key_with_an_extra_letter_or_outside_ascii_is_none() -> None:
    text = issue_key_text(new_id(API_KEY))
    assert parse_key_text(text + "0") is None
    assert parse_key_text(text[:-1] + "é") is None
    assert parse_key_text(text.upper()) is None


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "live"),
    [
        (None, None, True),
        (NOW + timedelta(seconds=1), None, True),
        (NOW, None, False),
        (None, NOW - timedelta(days=1), False),
        (NOW + timedelta(days=1), NOW, False),
    ],
)
def test_a_key_is_live_until_it_expires_or_is_revoked(
    expires_at: datetime | None, revoked_at: datetime | None, *, live: bool
) -> None:
    key = ApiKey(
        id=new_id(API_KEY),
        tenant_id="tenant_x",
        tenant_name="acme",
        name="key",
        scopes=frozenset({Scope.CLIENT}),
        created_at=NOW,
        expires_at=expires_at,
        revoked_at=revoked_at,
        last_used_at=None,
    )
    assert key.is_live(NOW) is live
