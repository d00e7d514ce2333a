"""Model names contain nothing with a meaning in a URL, and dated releases are listed with their family."""

from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import ValidationFailed
from server.payload.settings import check_settings
from server.providers.model_name import check_model_name, find_name_fault
from server.providers.model_profile import PROFILES, find_profile, profile_warnings
from server.providers.pricing import PRICES, find_price

HOSTILE = (
    "%2e%2e/cachedContents#",
    "x/%2e%2e/gemini-3.1-pro-preview",
    "../cachedContents",
    "..",
    ".",
    "models/..",
    "models/../cachedContents",
    "models/models/gemini-3.8-flash",
    "tunedModels/",
    "models/",
    "gemini-3.8-flash?key=x",
    "gemini-3.8-flash#",
    "gemini-3.8-flash&alt=sse",
    "gemini-3.8-flash:countTokens",
    "gemini\\..\\files",
    "gemini 3",
    "gemini-3\n",
    "gemini-3\x00",
    "/v1/files",
    "https://example.com/x",
    "-gemini",
    "g\u0435mini",
    "",
    "g" * 201,
)
"""For Gemini. The name of a Claude model is not in the URL, but none of these is accepted there either."""
DATED = (
    ("anthropic", "claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
    ("anthropic", "claude-opus-4-5-20251101", "claude-opus-4-5"),
    ("anthropic", "claude-haiku-4-5-20251001", "claude-haiku-4-5"),
    ("gemini", "gemini-2.5-pro-001", "gemini-2.5-pro"),
    ("gemini", "gemini-2.5-flash-preview-09-2025", "gemini-2.5-flash"),
    ("gemini", "gemini-3.1-pro-preview-11-2026", "gemini-3.1-pro-preview"),
    ("gemini", "gemini-2.5-pro-preview-05-06", "gemini-2.5-pro"),
    ("gemini", "models/gemini-3.8-flash", "gemini-3.8-flash"),
)


@pytest.mark.parametrize("model", HOSTILE)
def test_an_invalid_name_is_refused_with_its_field(model: str) -> None:
    with pytest.raises(ValidationFailed) as raised:
        check_settings("gemini", model, {})
    assert [fault["path"] for fault in raised.value.details["errors"]] == ["model"]  # type: ignore[attr-defined]  # reason: a list of faults


@pytest.mark.parametrize("model", [model for model in HOSTILE if ":countTokens" not in model])
def test_none_of_them_is_a_name_of_claude(model: str) -> None:
    assert find_name_fault("anthropic", model)


@pytest.mark.parametrize("provider", ["gemini", "anthropic"])
@given(model=st.text(max_size=40) | st.text(alphabet="ab3./:%#?@-_\\mdels", max_size=20).map("models/".__add__))
def test_an_accepted_name_is_unchanged_in_a_url(provider: str, model: str) -> None:
    if find_name_fault(provider, model) is not None:
        return
    prefix, _, name = model.rpartition("/")
    assert prefix in {"", "models", "tunedModels"}
    assert quote(name, safe="@:") == name
    address = f"https://host/v1beta/models/{name}:streamGenerateContent"
    assert urlsplit(address).path == f"/v1beta/models/{name}:streamGenerateContent"
    assert name not in {"", ".", ".."}


@pytest.mark.parametrize("model", PROFILES)
def test_every_listed_model_has_a_name_that_is_accepted(model: str) -> None:
    check_model_name(PROFILES[model].provider, model)


@pytest.mark.parametrize("model", ["models/gemini-3.8-flash", "tunedModels/mine-1", "gemini-pro-latest"])
def test_documented_forms_of_gemini_are_accepted(model: str) -> None:
    check_model_name("gemini", model)


@pytest.mark.parametrize(("provider", "model", "family"), DATED)
def test_a_dated_release_has_the_profile_and_the_price_of_its_family(provider: str, model: str, family: str) -> None:
    profile = find_profile(provider, model)
    assert (profile.model, profile.assumed, profile_warnings(profile)) == (model, False, ())
    assert profile.cache_minimum_tokens == PROFILES[family].cache_minimum_tokens
    now = datetime(2026, 11, 18, tzinfo=UTC)
    price = find_price(model, now, 1000)
    assert price is not None
    assert price == find_price(family, now, 1000)


@pytest.mark.parametrize("model", ["claude-sonnet-4-5-turbo", "gemini-2.5-pro-0001", "x-claude-sonnet-4-5-20250929"])
def test_an_invalid_date_is_another_model(model: str) -> None:
    assert find_price(model, datetime(2026, 11, 18, tzinfo=UTC), 1000) is None
    assert find_profile("anthropic", model).assumed


@given(st.sampled_from(PRICES))
def test_a_listed_name_is_never_treated_as_another(price: object) -> None:
    assert isinstance(price, type(PRICES[0]))
    found = find_price(price.model, datetime(2026, 11, 18, tzinfo=UTC), 0)
    assert found is not None
    assert found.model == price.model
