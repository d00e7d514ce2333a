"""Settings: data only, one class for those who run a server and a small one for those who call it. Every field is read
from the environment with the prefix `STRATA_`.

Nothing here builds anything; `wiring` passes plain values on to the adapters. The table in
docs/reference/settings.md is generated from these fields and checked by a test.
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
    """Where the embedded Postgres lives unless told otherwise: one place for a user, whatever the working directory.

    Root's home is closed to the account that Postgres runs under (it refuses to run as root), hence the system's place.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/strata")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "strata"


class Settings(BaseSettings):
    """All that an operator can choose."""

    model_config = SettingsConfigDict(env_prefix="STRATA_", env_ignore_empty=True, extra="ignore", frozen=True)

    # --- server
    host: str = Field(default="127.0.0.1", description="Address that the server listens on.")
    port: int = Field(default=8400, ge=0, le=65535, description="Port that the server listens on; 0 picks a free one.")
    shutdown_limit_seconds: float = Field(
        default=30.0, ge=0, le=3600, description="How long a stopping server lets running turns finish."
    )
    body_limit_bytes: int = Field(
        default=32 * MEBIBYTE, ge=1024, le=1024 * MEBIBYTE, description="Largest request body, in bytes."
    )
    body_total_bytes: int = Field(
        default=256 * MEBIBYTE,
        ge=1024 * 1024,
        le=1024 * 1024 * MEBIBYTE,
        description="Most bytes of request bodies that one process reads at the same time. Bodies up to 64 KiB do not "
        "count.",
    )
    body_wait_seconds: float = Field(
        default=10.0,
        ge=0,
        le=300,
        description="How long a large body waits for others to be read, before its request gets a 503 with the code "
        "`body_budget_exhausted`.",
    )
    body_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long a client may take to send a body, plus a second for each 16 KiB that arrive. After that "
        "the request gets a 408 and its connection is closed.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Most client connections of one server process. Any more are answered with 503 and closed.",
    )
    idle_connection_seconds: float = Field(
        default=75.0,
        gt=0,
        le=3600,
        description="How long a connection stays open without a request. It should be longer than a proxy keeps its "
        "idle connections to the server.",
    )
    head_seconds: float = Field(
        default=10.0,
        gt=0,
        le=300,
        description="How long a client may take to send the request line and the headers, before the answer is 408.",
    )
    max_head_bytes: int = Field(
        default=64 * 1024,
        ge=4096,
        le=16 * MEBIBYTE,
        description="Largest request line and headers together, in bytes; above it the answer is 431.",
    )
    max_header_bytes: int = Field(
        default=16 * 1024,
        ge=1024,
        le=16 * MEBIBYTE,
        description="Largest single header line, and longest request line, in bytes; above it the answer is 431.",
    )
    max_header_count: int = Field(
        default=100, ge=10, le=10_000, description="Most headers of one request; above it the answer is 431."
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins that browsers may call from, such as `https://app.example`, with commas between.",
    )

    trusted_proxies: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode] = Field(
        default=(),
        description="Addresses and networks of your own reverse proxies, such as `127.0.0.1` or `10.0.0.0/8`, with "
        "commas between. `X-Forwarded-For` and `X-Forwarded-Proto` are read from these only, and ignored from others.",
    )
    admin_idle_seconds: float = Field(
        default=1800.0, ge=10, le=86_400, description="An operator's session is over after so long without a request."
    )
    admin_session_seconds: float = Field(
        default=43_200.0,
        ge=60,
        le=2_592_000,
        description="An operator's session ends after this time, even if it is in use.",
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
        default=900.0, ge=1, le=86_400, description="Longest time for which failed logins get 429, in seconds."
    )

    rate_limit_per_minute: int = Field(
        default=0, ge=0, le=10_000_000, description="Requests per API key and minute, over all processes; 0: no limit."
    )
    keep_alive_seconds: float = Field(
        default=10.0, gt=0, le=15, description="A stream that has nothing to say sends a comment this often."
    )
    stream_stall_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="A client that reads nothing of its stream for this long is disconnected. It can go on from its "
        "last event with `last-event-id`.",
    )
    image_limit_bytes: int = Field(
        default=5 * MEBIBYTE, ge=1024, le=100 * MEBIBYTE, description="Largest image in a message, in bytes."
    )

    # --- turns
    lease_seconds: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="How long a server that runs a turn may be silent before another one ends the turn for it.",
    )
    flush_seconds: float = Field(
        default=0.25,
        gt=0,
        le=60,
        description="How often the bytes of a running answer are written down, for other processes and for a crash.",
    )
    turn_ending_seconds: float = Field(
        default=120.0,
        gt=0,
        le=3600,
        description="How long a turn may take to end once its provider has ended. After that the server cancels what "
        "still runs and ends the turn with what the provider said. If that takes as long again, the server gives the "
        "turn up: its listeners get `turn_stalled`, and when the lease expires any server ends the turn from the bytes "
        "that were written down.",
    )
    queue_limit: int = Field(
        default=100, ge=0, le=10_000, description="Most turns that wait for one conversation with `on_busy: queue`."
    )
    queue_seconds: float = Field(default=300.0, gt=0, le=86_400, description="How long such a turn waits at most.")
    turn_attempts: int = Field(
        default=4, ge=1, le=20, description="Most calls to the provider for one turn; only what is safe is repeated."
    )
    turn_retry_seconds: float = Field(
        default=60.0, ge=0, le=3600, description="Time for all of them: after it no other call is begun."
    )
    cache_storage_usd_per_hour: float = Field(
        default=1.0,
        ge=0,
        le=10_000,
        description="Most that all explicit caches together may cost per hour; beyond it none is made. 0: none at all.",
    )
    templates_dir: Path | None = Field(
        default=None, description="Your own prompt templates; what is not there comes from the built-in ones."
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
        description="How long a turn or a request waits for a free one of these processes before it fails with "
        "`template_workers_busy`.",
    )

    # --- database
    database_url: SecretStr | None = Field(
        default=None,
        description="An external Postgres, 15 or newer; unset means the embedded one. Several hosts are separated by "
        "commas; `target_session_attrs`, `sslmode`, `sslrootcert`, `sslcert` and `sslkey` work as in libpq.",
    )
    database_pool_size: int = Field(
        default=20, ge=1, le=1000, description="Most connections of one process; idle ones are closed after 5 minutes."
    )
    database_pool_wait_seconds: float = Field(
        default=5.0, gt=0, le=300, description="How long a request waits for a free connection before it gets a 503."
    )
    database_connect_seconds: float = Field(
        default=5.0, gt=0, le=300, description="How long one attempt to connect may take."
    )
    database_statement_seconds: float = Field(
        default=30.0, ge=0, le=3600, description="Postgres cancels a statement that takes longer; 0 means no limit."
    )
    database_application_name: str = Field(
        default="strata", max_length=63, description="The name shown in pg_stat_activity."
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Where the embedded Postgres and its logs lie. Not set, it is `/var/lib/strata` for root, else "
        "`$XDG_DATA_HOME/strata` or `~/.local/share/strata`.",
    )
    embedded_user: str = Field(
        default="strata-postgres",
        description="Account that the embedded Postgres runs under when Strata runs as root; made when it is missing.",
    )

    # --- background work
    worker_inside: bool = Field(
        default=True,
        description="Whether a server does background jobs itself. Switch it off where `strata worker` processes do.",
    )
    compaction_result_limit_chars: int = Field(
        default=0,
        ge=0,
        le=100_000_000,
        description="Longer tool results lose their end when they leave the buffer; 0 keeps them whole.",
    )
    compaction_alarm_tokens: int = Field(
        default=200_000,
        ge=1000,
        le=100_000_000,
        description="A request of this size that cannot be compacted, since a call stays open, raises an alarm.",
    )
    summary_limit_tokens: int = Field(
        default=4000,
        ge=200,
        le=32_000,
        description="Largest summary of old history, made where a model's window runs short.",
    )
    queue_log_days: int = Field(
        default=7, ge=1, le=3650, description="How long the job queue keeps its own records of jobs that are over."
    )
    raw_retention_days: int = Field(
        default=0,
        ge=0,
        le=36500,
        description="Raw provider bytes older than this are removed by the worker; turns stay. 0 keeps them for ever.",
    )

    # --- providers; their keys are GEMINI_API_KEY or GOOGLE_API_KEY, and ANTHROPIC_API_KEY
    gemini_base_url: str | None = Field(
        default=None, description="Another address for the Gemini API, such as that of `strata emulate gemini`."
    )
    anthropic_base_url: str | None = Field(
        default=None, description="Another address for the Claude API, such as that of `strata emulate anthropic`."
    )
    provider_connect_seconds: float = Field(
        default=10.0, gt=0, le=300, description="How long a connection to a provider may take to be made."
    )
    provider_silence_seconds: float = Field(
        default=120.0,
        gt=0,
        le=3600,
        description="A provider call is ended when nothing arrives for this long. A call that is not streamed, such as "
        "counting tokens, has to be complete within this time.",
    )
    provider_call_limit: int = Field(
        default=2000,
        ge=1,
        le=100_000,
        description="Maximum number of provider calls that one process makes at the same time. Each takes a file "
        "descriptor, and so does the client that waits for it.",
    )
    provider_call_wait_seconds: float = Field(
        default=10.0,
        ge=0,
        le=300,
        description="How long a turn waits for another provider call to end when the limit is reached, before the "
        "request gets a 503 with the code `call_limit_reached`.",
    )
    provider_call_seconds: float = Field(
        default=3600.0,
        gt=0,
        le=86_400,
        description="A provider call is ended when it takes longer than this in total, even if bytes keep arriving.",
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
        default="info", description="The least severe log events that are written."
    )
    log_format: Literal["auto", "pretty", "json"] = Field(
        default="auto", description="`auto` is pretty on a terminal and JSON otherwise."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`; unset sends nothing.",
    )
    otlp_headers: SecretStr | None = Field(
        default=None, description="Headers for the collector, `name=value` separated by commas."
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
            # Otherwise there is a fault for each kind of network.
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
                message = (
                    f"{origin!r} is no origin; it is a scheme and a host, and a port where it is not the usual one"
                )
                raise ValueError(message)
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _known_scheme(self) -> Self:
        if self.database_url is not None:
            scheme = self.database_url.get_secret_value().partition("://")[0]
            if scheme not in {"postgresql", "postgres"}:
                message = "STRATA_DATABASE_URL has to start with postgresql:// or postgres://"
                raise ValueError(message)
        return self

    @property
    def embedded(self) -> bool:
        """Whether the database is the embedded one."""
        return self.database_url is None


class ClientSettings(BaseSettings):
    """What a client has to know. A machine that only talks to a server needs nothing else."""

    model_config = SettingsConfigDict(env_prefix="STRATA_", env_ignore_empty=True, extra="ignore", frozen=True)

    url: str = Field(default="http://127.0.0.1:8400", description="The server that `strata chat` talks to.")
    api_key: SecretStr | None = Field(default=None, description="The key that it shows, of the scope `client`.")


AnySettings = TypeVar("AnySettings", Settings, ClientSettings)


def read_settings(**overrides: object) -> Settings:
    """The settings of this process; what is wrong with them is said in one sentence per field.

    Values are left out of the message: a database URL holds a password.
    """
    return _read(Settings, overrides)


def read_client_settings(**overrides: object) -> ClientSettings:
    """The same for a client."""
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
            f"The settings are not usable: {faults}.", hint="docs/reference/settings.md lists them all."
        ) from None
