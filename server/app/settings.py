"""Settings of a server and of a client, read from environment variables with the prefix `STRATA_`.

The classes contain only data; the other modules of this room pass the values to the parts that need them.
docs/reference/settings.md is generated from the descriptions of the fields, and a test compares them.
"""

import os
import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from server.conversation.errors import SettingsInvalid

MEBIBYTE: Final = 1024 * 1024
_MIN_TOKEN_CHARS: Final = 16
_ORIGIN: Final = re.compile(r"https?://[^/\s]+")


def default_data_dir() -> Path:
    """Return the default directory of the embedded Postgres: one per user, independent of the working directory.

    For root it is a system directory, because Postgres refuses to run as root and the account that it runs under cannot
    read root's home directory.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/strata")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "strata"


class Settings(BaseSettings):
    """The settings of servers, workers and commands."""

    model_config = SettingsConfigDict(env_prefix="STRATA_", env_ignore_empty=True, extra="ignore", frozen=True)

    # --- server
    host: str = Field(default="127.0.0.1", description="Address that the server listens on.")
    port: int = Field(default=8400, ge=0, le=65535, description="Port that the server listens on. 0 picks a free port.")
    shutdown_limit_seconds: float = Field(
        default=30.0, ge=0, le=3600, description="How long a stopping server waits for running turns, in seconds."
    )
    body_limit_bytes: int = Field(
        default=32 * MEBIBYTE, ge=1024, le=1024 * MEBIBYTE, description="Maximum size of a request body, in bytes."
    )
    body_total_bytes: int = Field(
        default=256 * MEBIBYTE,
        ge=1024 * 1024,
        le=1024 * 1024 * MEBIBYTE,
        description="Maximum total size of the request bodies that one process reads at the same time, in bytes. "
        "Bodies of up to 64 KiB do not count.",
    )
    body_wait_seconds: float = Field(
        default=10.0,
        ge=0,
        le=300,
        description="How long a request with a large body waits for other bodies to be read, in seconds. After that "
        "it gets a 503 with the code `body_budget_exhausted`.",
    )
    body_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Time limit for sending a request body, in seconds. It is extended by one second per 16 KiB "
        "received. After that the request gets a 408 and its connection is closed.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Maximum number of client connections per process. Further connections get a 503 and are closed.",
    )
    idle_connection_seconds: float = Field(
        default=75.0,
        gt=0,
        le=3600,
        description="How long a connection stays open without a request, in seconds. Set it higher than the idle "
        "timeout of a proxy in front of the server.",
    )
    head_seconds: float = Field(
        default=10.0,
        gt=0,
        le=300,
        description="Time limit for sending the request line and the headers, in seconds. After that the request gets "
        "a 408.",
    )
    max_head_bytes: int = Field(
        default=64 * 1024,
        ge=4096,
        le=16 * MEBIBYTE,
        description="Maximum size of the request line and all headers, in bytes. Larger requests get a 431.",
    )
    max_header_bytes: int = Field(
        default=16 * 1024,
        ge=1024,
        le=16 * MEBIBYTE,
        description="Maximum size of one header line or of the request line, in bytes. Larger requests get a 431.",
    )
    max_header_count: int = Field(
        default=100,
        ge=10,
        le=10_000,
        description="Maximum number of headers of a request. Requests with more get a 431.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins from which browsers may call the API, such as `https://app.example`, separated by commas.",
    )

    trusted_proxies: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode] = Field(
        default=(),
        description="Addresses and networks of your own reverse proxies, such as `127.0.0.1` or `10.0.0.0/8`, "
        "separated by commas. `X-Forwarded-For` and `X-Forwarded-Proto` are ignored unless they come from one of "
        "these.",
    )
    admin_idle_seconds: float = Field(
        default=1800.0,
        ge=10,
        le=86_400,
        description="An operator's session ends after this time without a request, in seconds.",
    )
    admin_session_seconds: float = Field(
        default=43_200.0,
        ge=60,
        le=2_592_000,
        description="An operator's session ends after this time even if it is in use, in seconds.",
    )
    admin_login_failures: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Number of failed logins to the admin pages, for one key from one address, after which further "
        "attempts with a wrong secret get 429: for one second, and for twice as long after each further failure. The "
        "right key always works.",
    )
    admin_lock_seconds: float = Field(
        default=900.0, ge=1, le=86_400, description="Maximum time for which failed logins get 429, in seconds."
    )

    rate_limit_per_minute: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Maximum requests per API key and minute, over all processes. 0 means no limit.",
    )
    keep_alive_seconds: float = Field(
        default=10.0, gt=0, le=15, description="Interval of the comments that an idle stream sends, in seconds."
    )
    stream_stall_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="A client that does not read its stream for this time is disconnected, in seconds. It can resume "
        "after its last event with `last-event-id`.",
    )
    image_limit_bytes: int = Field(
        default=5 * MEBIBYTE, ge=1024, le=100 * MEBIBYTE, description="Maximum size of an image in a message, in bytes."
    )

    # --- turns
    lease_seconds: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="If the server that runs a turn does not renew its lease for this time, in seconds, another "
        "server ends the turn.",
    )
    flush_seconds: float = Field(
        default=0.25,
        gt=0,
        le=60,
        description="Interval at which the bytes of a running answer are stored, in seconds.",
    )
    turn_ending_seconds: float = Field(
        default=120.0,
        gt=0,
        le=3600,
        description="Time limit for ending a turn after its provider call has ended, in seconds. After that the "
        "server cancels the remaining work and ends the turn with the received answer. If that takes the same time "
        "again, the server abandons the turn: its clients get `turn_stalled`, and after the lease has expired any "
        "server ends the turn from the stored bytes.",
    )
    queue_limit: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="Maximum number of turns that wait for one conversation with `on_busy: queue`.",
    )
    queue_seconds: float = Field(
        default=300.0, gt=0, le=86_400, description="How long a turn waits with `on_busy: queue`, in seconds."
    )
    turn_attempts: int = Field(
        default=4,
        ge=1,
        le=20,
        description="Maximum number of provider calls for one turn. Only errors that are safe to retry are retried.",
    )
    turn_retry_seconds: float = Field(
        default=60.0, ge=0, le=3600, description="No provider call of a turn is retried after this time, in seconds."
    )
    cache_storage_usd_per_hour: float = Field(
        default=1.0,
        ge=0,
        le=10_000,
        description="Maximum cost of all explicit caches per hour. No cache is created above it. 0 disables explicit "
        "caches.",
    )
    templates_dir: Path | None = Field(
        default=None,
        description="Directory of your own prompt templates. Templates that it does not contain are the built-in ones.",
    )

    template_workers: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Maximum number of processes per server that render templates from the network and evaluate "
        "assertions. They are started when they are needed. One tenant occupies all but one of them at most; with 1 "
        "all tenants share it.",
    )
    template_wait_seconds: float = Field(
        default=10.0,
        gt=0,
        le=300,
        description="How long a turn or a request waits for a free template process, in seconds. After that it fails "
        "with `template_workers_busy`.",
    )

    # --- database
    database_url: SecretStr | None = Field(
        default=None,
        description="URL of an external Postgres, version 15 or newer. If it is not set, the embedded Postgres is "
        "used. Several hosts are separated by commas; `target_session_attrs`, `sslmode`, `sslrootcert`, `sslcert` and "
        "`sslkey` work as in libpq.",
    )
    database_read_url: SecretStr | None = Field(
        default=None,
        description="A replica of the external Postgres for lists, searches, overviews and usage reports of operators "
        "and for `strata replay verify`. While it cannot be reached, they read the primary.",
    )
    database_pool_size: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="Maximum number of database connections per process. Idle ones are closed after 5 minutes.",
    )
    database_pool_wait_seconds: float = Field(
        default=5.0,
        gt=0,
        le=300,
        description="How long a request waits for a free database connection, in seconds. After that it gets a 503.",
    )
    database_connect_seconds: float = Field(
        default=5.0, gt=0, le=300, description="Time limit of one attempt to connect to the database, in seconds."
    )
    database_statement_seconds: float = Field(
        default=30.0, ge=0, le=3600, description="Time limit of a database statement, in seconds. 0 means no limit."
    )
    database_application_name: str = Field(
        default="strata", max_length=63, description="Name of the connections in `pg_stat_activity`."
    )
    database_plan_mode: Literal["force_generic_plan", "auto", "force_custom_plan"] = Field(
        default="force_generic_plan",
        description="`plan_cache_mode` of the connections. Set it to `auto` on a Citus cluster.",
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Directory of the embedded Postgres and its logs. The default is `/var/lib/strata` for root, and "
        "otherwise `$XDG_DATA_HOME/strata` or `~/.local/share/strata`.",
    )
    embedded_user: str = Field(
        default="strata-postgres",
        description="Account that the embedded Postgres runs under if Strata runs as root. It is created if necessary.",
    )

    # --- background work
    worker_inside: bool = Field(
        default=True,
        description="Whether a server runs background jobs itself. Disable it if `strata worker` processes run them.",
    )
    compaction_result_limit_chars: int = Field(
        default=0,
        ge=0,
        le=100_000_000,
        description="Tool results longer than this are truncated when they are compacted, in characters. 0 means no "
        "limit.",
    )
    compaction_alarm_tokens: int = Field(
        default=200_000,
        ge=1000,
        le=100_000_000,
        description="An alarm is raised if a request of this size cannot be compacted because a tool call is pending, "
        "in tokens.",
    )
    summary_limit_tokens: int = Field(
        default=4000,
        ge=200,
        le=32_000,
        description="Maximum length of a summary, which replaces history near the limit of the context window, in "
        "tokens.",
    )
    queue_log_days: int = Field(
        default=7, ge=1, le=3650, description="How long the job queue keeps records of ended jobs, in days."
    )
    raw_retention_days: int = Field(
        default=0,
        ge=0,
        le=36500,
        description="Raw provider bytes older than this are deleted, in days. Turns are kept. 0 means never.",
    )

    # --- providers; their keys are GEMINI_API_KEY or GOOGLE_API_KEY, and ANTHROPIC_API_KEY
    gemini_base_url: str | None = Field(
        default=None,
        description="Base URL of the Gemini API, if it is not Google's, such as that of `strata emulate gemini`.",
    )
    anthropic_base_url: str | None = Field(
        default=None,
        description="Base URL of the Claude API, if it is not Anthropic's, such as that of `strata emulate anthropic`.",
    )
    provider_connect_seconds: float = Field(
        default=10.0, gt=0, le=300, description="Time limit for connecting to a provider, in seconds."
    )
    provider_silence_seconds: float = Field(
        default=120.0,
        gt=0,
        le=3600,
        description="A provider call is ended if no byte arrives for this time, in seconds. A call that is not "
        "streamed, such as counting tokens, must be complete within this time.",
    )
    provider_call_limit: int = Field(
        default=2000,
        ge=1,
        le=100_000,
        description="Maximum number of concurrent provider calls per process. Each needs a file descriptor, and so "
        "does the client that waits for it.",
    )
    provider_call_wait_seconds: float = Field(
        default=10.0,
        ge=0,
        le=300,
        description="How long a turn waits for another provider call to end if the limit is reached, in seconds. "
        "After that the request gets a 503 with the code `call_limit_reached`.",
    )
    provider_call_seconds: float = Field(
        default=3600.0,
        gt=0,
        le=86_400,
        description="A provider call is ended if it takes longer than this in total, even if bytes arrive, in seconds.",
    )

    # --- telemetry
    metrics_token: SecretStr | None = Field(
        default=None,
        description="If set, `/metrics` requires `Authorization: Bearer` with this token. At least 16 characters.",
    )
    metrics_assistant_labels: bool = Field(
        default=False,
        description="Whether the token and cost metrics of `/metrics` have the assistant's id as a label, for the "
        "assistants of all tenants.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum severity of log events."
    )
    log_format: Literal["auto", "pretty", "json"] = Field(
        default="auto", description="Format of the log. `auto` is `pretty` on a terminal and `json` otherwise."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`. If it is "
        "not set, no spans are sent.",
    )
    otlp_headers: SecretStr | None = Field(
        default=None, description="Headers for the OpenTelemetry collector, `name=value` separated by commas."
    )
    service_name: str = Field(default="strata", description="`service.name` of the OpenTelemetry resource.")

    @field_validator("cors_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("trusted_proxies", mode="wrap")
    @classmethod
    def _networks_only(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            # Otherwise there would be an error for each type of network.
            message = "expected addresses or networks, such as 127.0.0.1 or 10.0.0.0/8, separated by commas"
            raise ValueError(message) from None

    @field_validator("metrics_token")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value) < _MIN_TOKEN_CHARS:
            message = f"expected at least {_MIN_TOKEN_CHARS} characters"
            raise ValueError(message)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                message = f"{origin!r} is not an origin: a scheme, a host, and a port if it is not the default"
                raise ValueError(message)
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _known_scheme(self) -> Self:
        for name, url in (("DATABASE_URL", self.database_url), ("DATABASE_READ_URL", self.database_read_url)):
            if url is not None:
                scheme = url.get_secret_value().partition("://")[0]
                if scheme not in {"postgresql", "postgres"}:
                    message = f"STRATA_{name} must start with postgresql:// or postgres://"
                    raise ValueError(message)
        if self.database_read_url is not None and self.database_url is None:
            message = "STRATA_DATABASE_READ_URL needs STRATA_DATABASE_URL: the embedded Postgres has no replica"
            raise ValueError(message)
        return self

    @property
    def embedded(self) -> bool:
        """Whether the database is the embedded one."""
        return self.database_url is None


class ClientSettings(BaseSettings):
    """The settings of `strata chat`. A machine that only calls a server needs no others."""

    model_config = SettingsConfigDict(env_prefix="STRATA_", env_ignore_empty=True, extra="ignore", frozen=True)

    url: str = Field(default="http://127.0.0.1:8400", description="URL of the server that `strata chat` uses.")
    api_key: SecretStr | None = Field(
        default=None, description="API key that `strata chat` uses, with the scope `client`."
    )


AnySettings = TypeVar("AnySettings", Settings, ClientSettings)


def read_settings(**overrides: object) -> Settings:
    """Read the settings. `overrides` that are not None take precedence over the environment.

    Raises `SettingsInvalid` with a message per invalid field. The message does not contain values, because a database
    URL contains a password.
    """
    return _read(Settings, overrides)


def read_client_settings(**overrides: object) -> ClientSettings:
    """Read the settings of a client in the same way."""
    return _read(ClientSettings, overrides)


def _read(kind: type[AnySettings], overrides: Mapping[str, object]) -> AnySettings:
    try:
        return kind(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]  # reason: overrides are validated by the call itself
    except ValidationError as error:
        faults = "; ".join(
            f"{'STRATA_' + str(fault['loc'][0]).upper() + ': ' if fault['loc'] else ''}"
            f"{fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise SettingsInvalid(
            f"The settings are invalid: {faults}.", hint="docs/reference/settings.md lists all settings."
        ) from None
