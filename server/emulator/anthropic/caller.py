"""The caller: account, API version and betas.

Every key is accepted except `invalid`. The account is the key up to its first `/`, so `acme/1` and `acme/2` are two
keys of one account. A key that begins with `old-` belongs to an account from before 2026-08-31, for which most models
do not enforce the prefix check of thinking blocks.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from server.emulator.anthropic.errors import ApiProblem, Refused, invalid

VERSION_2023: Final = "2023-06-01"
VERSION_2026: Final = "2026-10-21"
_INVALID_KEY: Final = "invalid"
_OLD_ACCOUNT: Final = "old-"

BINDING_CONTROLS: Final = "thinking-binding-controls-2026-08-01"
COMPACT_ON_DEMAND: Final = "compact-2026-09-04"
COMPACT_AT_THRESHOLD: Final = "compact-2026-01-12"
CLEAR_AT: Final = "mid-conversation-system-clear-at-2026-08-21"
MESSAGE_EFFORT: Final = "mid-conversation-output-config-2026-07-01"
DISPLAY_UPDATES: Final = "thinking-display-updates-2026-08-18"
THREADS: Final = "message-threads-2026-08-12"
CONTEXT_MANAGEMENT: Final = "context-management-2025-06-27"
TOOL_CHANGES: Final = ("inline-tools-2026-09-15", "mid-conversation-tool-changes-2026-07-01")
FALLBACKS: Final = ("server-side-fallback-2026-06-01", "server-side-fallback-2026-07-01")
FALLBACK_CREDIT: Final = ("fallback-credit-2026-06-01", "fallback-credit-2026-07-01")
MCP: Final = ("mcp-client-2025-04-04", "mcp-client-2025-11-20", "mcp-client-2026-09-15")
DIAGNOSIS: Final = "cache-diagnosis-2026-04-07"

_KNOWN_BETAS: Final = frozenset(
    {
        BINDING_CONTROLS,
        COMPACT_ON_DEMAND,
        COMPACT_AT_THRESHOLD,
        CLEAR_AT,
        MESSAGE_EFFORT,
        DISPLAY_UPDATES,
        THREADS,
        CONTEXT_MANAGEMENT,
        *TOOL_CHANGES,
        *FALLBACKS,
        *FALLBACK_CREDIT,
        *MCP,
        DIAGNOSIS,
        "message-batches-2024-09-24",
        "prompt-caching-2024-07-31",
        "pdfs-2024-09-25",
        "token-counting-2024-11-01",
        "token-efficient-tools-2025-02-19",
        "output-128k-2025-02-19",
        "files-api-2025-04-14",
        "interleaved-thinking-2025-05-14",
        "fine-grained-tool-streaming-2025-05-14",
        "code-execution-2025-05-22",
        "extended-cache-ttl-2025-04-11",
        "context-1m-2025-08-07",
        "model-context-window-exceeded-2025-08-26",
        "structured-outputs-2025-11-13",
        "fast-mode-2026-02-01",
        "output-300k-2026-03-24",
        "thinking-token-count-2026-05-13",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    organization_id: str
    """The same for all keys of an account. It is not the key itself, because it becomes part of stored signatures."""
    is_old_account: bool
    version: str
    betas: frozenset[str]

    def has_beta(self, *names: str) -> bool:
        """Whether any of these betas is on."""
        return not self.betas.isdisjoint(names)


def identify(headers: Mapping[str, str]) -> Caller:
    """The caller. Raises `Refused` with a 401 for the key and a 400 for the version or an unknown beta."""
    key = _read_key(headers)
    version = headers.get("anthropic-version", "")
    if not version:
        raise invalid("anthropic-version: header is required")
    if version not in {VERSION_2023, VERSION_2026}:
        raise invalid(f'anthropic-version: "{version}" is not a valid version')
    account = key.split("/", 1)[0]
    return Caller(
        organization_id=_name_organization(account),
        is_old_account=account.startswith(_OLD_ACCOUNT),
        version=version,
        betas=_read_betas(headers.get("anthropic-beta", "")),
    )


def _name_organization(account: str) -> str:
    digest = hashlib.sha256(account.encode()).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-8{digest[17:20]}-{digest[20:32]}"


def _read_key(headers: Mapping[str, str]) -> str:
    if "x-api-key" in headers:  # takes precedence over the other header
        key, complaint = headers["x-api-key"].strip(), "invalid x-api-key"
    else:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key, complaint = key.strip(), "Invalid bearer token"
        if scheme.lower() != "bearer":
            raise _unauthenticated("x-api-key header is required")
    if not key or key == _INVALID_KEY:
        raise _unauthenticated(complaint)
    return key


def _read_betas(header: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in header.split(",") if name.strip())
    if unknown := sorted(names - _KNOWN_BETAS):
        quoted = ", ".join(f"`{name}`" for name in unknown)
        raise invalid(
            f"Unexpected value(s) {quoted} for the `anthropic-beta` header. Please consult our documentation at "
            "docs.claude.com or try again without the header."
        )
    return names


def _unauthenticated(message: str) -> Refused:
    return Refused(ApiProblem(type="authentication_error", message=message))
