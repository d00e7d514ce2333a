"""Settings come from the environment, and an invalid one is rejected without its value."""

from pathlib import Path

import pytest

from server.app.settings import default_data_dir, read_settings
from server.conversation.errors import SettingsInvalid


def test_everything_has_a_default() -> None:
    settings = read_settings()
    assert (settings.host, settings.port, settings.embedded) == ("127.0.0.1", 8400, True)


def test_the_environment_is_read_and_an_override_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_PORT", "9000")
    monkeypatch.setenv("STRATA_CORS_ORIGINS", "https://app.example, http://127.0.0.1:3000,")
    monkeypatch.setenv("STRATA_DATA_DIR", "~/strata-data")
    monkeypatch.setenv("STRATA_LOG_LEVEL", "")
    settings = read_settings(host=None, port=9001)
    assert (settings.host, settings.port, settings.log_level) == ("127.0.0.1", 9001, "info")
    assert settings.cors_origins == ("https://app.example", "http://127.0.0.1:3000")
    assert settings.data_dir == Path.home() / "strata-data"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("STRATA_PORT", "none", "STRATA_PORT: Input should be a valid integer"),
        ("STRATA_PORT", "70000", "STRATA_PORT: Input should be less than or equal to 65535"),
        ("STRATA_LOG_FORMAT", "xml", "STRATA_LOG_FORMAT: Input should be 'auto', 'pretty' or 'json'"),
        ("STRATA_DATABASE_URL", "mysql://u:hunter2@h/d", "must start with postgresql:// or postgres://"),
        (
            "STRATA_CORS_ORIGINS",
            "https://app.example/path",
            "STRATA_CORS_ORIGINS: 'https://app.example/path' is not an origin",
        ),
        ("STRATA_METRICS_TOKEN", "hunter2", "invalid: STRATA_METRICS_TOKEN: expected at least 16 characters."),
        (
            "STRATA_TRUSTED_PROXIES",
            "127.0.0.1, hunter2, 10.0.0.1/8",
            "invalid: STRATA_TRUSTED_PROXIES: expected addresses or networks, such as 127.0.0.1 or 10.0.0.0/8",
        ),
    ],
)
def test_a_wrong_value_is_named_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsInvalid) as caught:
        read_settings()
    assert sentence in caught.value.message
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_is_not_shown_by_printing_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_DATABASE_URL", "postgresql://u:hunter2@h/d")
    assert "hunter2" not in repr(read_settings())


def test_the_default_data_directory_depends_on_the_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert default_data_dir() == Path.home() / ".local" / "share" / "strata"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_data_dir() == Path("/data/strata")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_data_dir() == Path("/var/lib/strata")
