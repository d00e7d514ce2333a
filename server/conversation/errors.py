"""All errors that Strata raises, as one tree.

    StrataError
    ├── Invalid                     the request is wrong; sending it again unchanged fails again
    │   ├── ValidationFailed        a field has a value that is not allowed
    │   ├── RequestMalformed        the bytes on the connection are not HTTP/1.1
    │   ├── RequestHeadTooLarge     the request line and headers exceed a limit of size or number
    │   ├── RequestHeadTimedOut     the request line and headers did not arrive in time
    │   ├── BodyMalformed           the body is not valid JSON
    │   ├── BodyTooLarge            the body exceeds the size limit
    │   ├── BodyTimedOut            the body did not arrive in time
    │   ├── MediaTypeUnsupported    the route does not accept this content type
    │   ├── MethodNotAllowed        the route does not support this method
    │   ├── CursorInvalid           the page cursor was not issued by this server
    │   ├── HistoryRuleBroken       the turn would produce a history that providers reject
    │   ├── TemplateInvalid         an instruction does not parse, or depends on the clock
    │   ├── ArchiveInvalid          the file to import is truncated, altered, or not an archive
    │   └── PriceUnknown            a budget in USD was given for a model without a known price
    ├── Refused                     the caller may not do this
    │   ├── KeyRejected             the key is missing, unknown, expired or revoked
    │   ├── ScopeMissing            the key lacks the scope for this route
    │   ├── OtherTenantReadOnly     a superadmin key tried to change data of another tenant
    │   ├── RateLimited             the key has used up its requests
    │   ├── SessionEnded            there is no operator session, or it has expired
    │   ├── LoginLocked             too many failed logins with this key from this address
    │   └── RequestForged           the form was not submitted from a page of this session
    ├── NotFound                    the object does not exist, or belongs to another tenant
    │   ├── RouteNotFound
    │   ├── TenantNotFound
    │   ├── ApiKeyNotFound
    │   ├── AssistantNotFound
    │   ├── ConversationNotFound
    │   ├── TurnNotFound
    │   ├── CallNotFound
    │   ├── RawBytesRemoved         retention has removed the raw bytes of a call
    │   ├── ImageNotFound
    │   ├── CompactionNotFound      there is no compaction to undo
    │   ├── ViewNotFound
    │   └── ReplayNotFound          also for an item or a result of a replay
    ├── Conflict                    the request is valid, but not in the present state
    │   ├── ConversationBusy        another turn of the conversation is running
    │   ├── QueueFull               too many turns are waiting for the conversation
    │   ├── TurnNotRunning          there is no running turn to cancel
    │   ├── RevisionMismatch        the conversation has a newer revision than the request expects
    │   ├── AssistantRevised        the assistant has a newer version than the one that was edited
    │   ├── IdempotencyKeyReused    the idempotency key was used with another body
    │   ├── EpochMoved              another epoch began or a turn was accepted meanwhile
    │   ├── LeaseLost               another process has taken over the conversation
    │   ├── TenantExists
    │   ├── TenantNotEmpty          the tenant already has conversations
    │   ├── ConversationExists      a conversation to import already exists
    │   ├── AssistantExists         another assistant has the id and version of one to import
    │   ├── ViewExists
    │   ├── ViewLimitReached        the tenant has the maximum number of saved views
    │   ├── ReplayEnded             the replay has ended and cannot continue
    │   └── ReplayBusy              the replay is running and has to be stopped first
    ├── Unavailable                 the server cannot do this now; a later attempt may succeed
    │   ├── DatabaseUnavailable     Postgres does not respond
    │   ├── SchemaBehind            the database schema is older than this release
    │   ├── SchemaAhead             the database schema is newer than this release
    │   ├── CheckTimedOut           a readiness check did not finish in time
    │   ├── SummaryUnavailable      the oldest history could not be summarised yet
    │   ├── TemplateWorkersBusy     no template worker became free in time
    │   ├── TurnInterrupted         the process that ran the turn stopped; received output is kept
    │   ├── TurnStalled             the provider finished, but the turn did not end in time
    │   ├── AnswerUnstorable        the answer cannot be stored; its raw bytes are kept
    │   ├── AnswerUnreadable        the bytes of an interrupted answer cannot be decoded; they are kept
    │   ├── BodyBudgetExhausted     the memory for request bodies is used up
    │   ├── ConnectionLimitReached  the server has the maximum number of open connections
    │   └── ShuttingDown            this process accepts no new work
    ├── Setup                       the operator has to change something before the server can start
    │   ├── SettingsInvalid
    │   ├── DatabaseUnsupported     Postgres is too old, or the database is not UTF-8
    │   ├── DataDirectoryForbidden  the data directory cannot be read or written
    │   ├── DataDirectoryIncompatible  the data directory belongs to another PostgreSQL major version
    │   ├── DiskFull
    │   ├── EmbeddedStartFailed     the embedded Postgres did not start
    │   ├── MigrationFailed
    │   └── AddressInUse
    ├── ProviderFailed              the provider, or the connection to it, failed
    │   ├── ProviderNotConfigured   this server has no API key for the provider
    │   ├── ProviderRateLimited     the provider's rate limit is reached
    │   ├── ProviderQuotaExceeded   the provider account has no quota left; waiting does not help
    │   ├── ProviderOverloaded      the provider has no capacity
    │   ├── ProviderUnavailable     the provider failed, or cannot be reached
    │   ├── ProviderTimedOut        the provider sent nothing for too long
    │   ├── ProviderDisconnected    the connection closed in the middle of the answer
    │   ├── ProviderEndedEarly      the stream ended properly, but before the model had finished
    │   ├── ProviderEmpty           the model finished without any output
    │   ├── ProviderMalformed       the response does not match the provider's documented format
    │   ├── ProviderCallMalformed   the model produced a tool call that cannot be parsed
    │   ├── ProviderRejected        the provider rejected the request as invalid
    │   ├── ProviderAuthentication  the provider rejected the credentials
    │   ├── ContextTooLong          the request exceeds the model's context window
    │   ├── SignatureRejected       the provider rejected a signature in the history
    │   ├── AnswerRejected          the provider rejected a part of one of its own answers
    │   ├── PrefixMismatch          thinking was sent after a different prefix than it was created with
    │   ├── SummaryRejected         the provider rejected a summary that it had signed
    │   ├── CallLimitReached        this server has the maximum number of concurrent provider calls
    │   └── CacheGone               an explicit cache has expired or was deleted
    └── Internal                    a bug in Strata; details are never sent to a client

Each leaf has a `code`. Codes are part of the public API. The docstring of a class is its default message, so
documentation and message are the same text. `hint` says how to resolve the error. `web/errors.py` maps codes to HTTP
statuses, `cli/exit_codes.py` to exit codes; this module depends on neither.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar


class StrataError(Exception):
    """An error occurred."""

    code: ClassVar[str] = ""
    hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, hint: str = "", **details: object) -> None:
        """`details` are machine-readable facts for the client. They contain no content and no secrets."""
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.advice = hint or type(self).hint
        self.details: Mapping[str, object] = details
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".strip()


class Invalid(StrataError):
    """The request is invalid."""


class ValidationFailed(Invalid):
    """A field of the request has a value that is not allowed."""

    code = "validation_failed"
    hint = "Correct the fields listed in `errors` and send the request again."


class RequestMalformed(Invalid):
    """The request is not valid HTTP/1.1."""

    code = "request_malformed"
    hint = "Send the request with an HTTP client library. This port serves no other protocol."


class RequestHeadTooLarge(Invalid):
    """The request line and headers exceed a limit of this server."""

    code = "request_head_too_large"
    hint = (
        "Send fewer or shorter headers, or raise STRATA_MAX_HEAD_BYTES, STRATA_MAX_HEADER_BYTES or "
        "STRATA_MAX_HEADER_COUNT on the server."
    )


class RequestHeadTimedOut(Invalid):
    """The request line and the headers did not arrive in time."""

    code = "request_head_timed_out"
    hint = "Send the request again on a new connection, or raise STRATA_HEAD_SECONDS on the server."


class BodyMalformed(Invalid):
    """The request body is not valid JSON."""

    code = "body_malformed"
    hint = "Send a JSON document in UTF-8."


class BodyTooLarge(Invalid):
    """The request body exceeds the size limit of this server."""

    code = "body_too_large"
    hint = "Send a smaller body, or raise STRATA_BODY_LIMIT_BYTES on the server."


class BodyTimedOut(Invalid):
    """The request body did not arrive in time."""

    code = "body_timed_out"
    hint = "Send the request again. Operators can raise STRATA_BODY_SECONDS."


class MediaTypeUnsupported(Invalid):
    """The route does not accept a body of this content type."""

    code = "media_type_unsupported"
    hint = "Send `Content-Type: application/json`."


class MethodNotAllowed(Invalid):
    """The route does not support this HTTP method."""

    code = "method_not_allowed"
    hint = "The `Allow` header lists the supported methods. /schema describes all routes."


class CursorInvalid(Invalid):
    """The page cursor was not issued by this server."""

    code = "cursor_invalid"
    hint = "Request the first page, without a cursor."


class HistoryRuleBroken(Invalid):
    """The turn would produce a history that providers reject."""

    code = "history_rule_broken"
    hint = "See `rule` and the ids beside it. GET the conversation to see its pending tool calls."


class TemplateInvalid(Invalid):
    """An instruction of the assistant is not a valid template."""

    code = "template_invalid"
    hint = "See `template` and `line`. Instructions can use assistant, conversation, session, args and variables."


class ArchiveInvalid(Invalid):
    """The file is not a complete archive of conversations."""

    code = "archive_invalid"
    hint = "Export it again, with this release or an older one. Nothing was imported."


class PriceUnknown(Invalid):
    """The model has no known price, so a budget in USD cannot be enforced."""

    code = "price_unknown"
    hint = "Set the budget in tokens."


class Refused(StrataError):
    """The caller is not allowed to do this."""


class KeyRejected(Refused):
    """The API key is missing, unknown, expired or revoked."""

    code = "key_rejected"
    hint = "Send `Authorization: Bearer <key>` with a key created by `strata keys create`."


class ScopeMissing(Refused):
    """The API key lacks the scope for this route."""

    code = "scope_missing"
    hint = "Use a key that has the scope named in `scope`."


class OtherTenantReadOnly(Refused):
    """The object belongs to another tenant. A superadmin key can read data of other tenants, but not change it."""

    code = "other_tenant_read_only"
    hint = "Use an admin key of the tenant that owns the object."


class RateLimited(Refused):
    """The key has exceeded its rate limit."""

    code = "rate_limited"
    hint = "Wait for the time in `Retry-After`. Operators can raise STRATA_RATE_LIMIT_PER_MINUTE."


class SessionEnded(Refused):
    """There is no operator session, or it has expired."""

    code = "session_ended"
    hint = "Log in at /admin/login with an admin key. Programs use /admin/api with the key itself."


class LoginLocked(Refused):
    """Too many logins with this key from this address have failed, and this one failed too."""

    code = "login_locked"
    hint = "Check the key: the correct key is accepted at any time. Wrong keys are refused until `Retry-After`."


class RequestForged(Refused):
    """The form was not submitted from a page of this session."""

    code = "request_forged"
    hint = "Reload the page and submit the form again."


class NotFound(StrataError):
    """The object does not exist."""


class RouteNotFound(NotFound):
    """This route does not exist."""

    code = "route_not_found"
    hint = "/schema describes all routes."


class TenantNotFound(NotFound):
    """There is no tenant with this name."""

    code = "tenant_not_found"
    hint = "`strata keys list` shows the tenants. `strata keys create --tenant NAME` creates one."


class ApiKeyNotFound(NotFound):
    """There is no API key with this id."""

    code = "api_key_not_found"
    hint = "`strata keys list` shows the ids."


class AssistantNotFound(NotFound):
    """There is no assistant with this id and version."""

    code = "assistant_not_found"
    hint = "List the assistants to see their ids and latest versions."


class ConversationNotFound(NotFound):
    """There is no conversation with this id."""

    code = "conversation_not_found"
    hint = "List the conversations to see their ids. The conversation may have been erased."


class TurnNotFound(NotFound):
    """The conversation has no turn with this number."""

    code = "turn_not_found"
    hint = "List the conversation's turns to see their numbers."


class CallNotFound(NotFound):
    """The turn has no provider call with this number."""

    code = "call_not_found"
    hint = "List the calls of the turn to see their numbers."


class RawBytesRemoved(NotFound):
    """The raw bytes of an earlier call that this call continues have been removed."""

    code = "raw_bytes_removed"
    hint = "STRATA_RAW_RETENTION_DAYS sets how long raw bytes are kept."


class ImageNotFound(NotFound):
    """The conversation has no image with this hash."""

    code = "image_not_found"
    hint = "Use the `sha256` of an image block."


class CompactionNotFound(NotFound):
    """The conversation has no compaction that can be undone."""

    code = "compaction_not_found"
    hint = "List the compactions of the conversation."


class ViewNotFound(NotFound):
    """There is no saved view with this id."""

    code = "view_not_found"
    hint = "The view may have been deleted. See the list of saved views."


class ReplayNotFound(NotFound):
    """There is no such replay, or it has no such item or result."""

    code = "replay_not_found"
    hint = "List the replays. Erasing a conversation also removes its items and results."


class Conflict(StrataError):
    """The request conflicts with the present state."""


class ConversationBusy(Conflict):
    """Another turn of this conversation is running."""

    code = "conversation_busy"
    hint = "Wait until the turn ends, or send `on_busy`: `queue` or `supersede`."


class QueueFull(Conflict):
    """Too many turns are waiting for this conversation."""

    code = "queue_full"
    hint = "Try again later. Operators can raise STRATA_QUEUE_LIMIT."


class TurnNotRunning(Conflict):
    """There is no running turn to cancel, or another turn is running."""

    code = "turn_not_running"
    hint = "The turn has already ended. GET the conversation to see its state."


class RevisionMismatch(Conflict):
    """The conversation has a newer revision than the request expects."""

    code = "revision_mismatch"
    hint = "GET the conversation, read the new turns, and send the request again with the new revision."


class AssistantRevised(Conflict):
    """The assistant has a newer version than the one that was edited."""

    code = "assistant_revised"
    hint = "Load the latest version, apply the change to it, and save again."


class IdempotencyKeyReused(Conflict):
    """This idempotency key was already used with another body."""

    code = "idempotency_key_reused"
    hint = "Use a new key for a new request."


class EpochMoved(Conflict):
    """Another epoch began, or a turn was accepted, since the conversation was loaded."""

    code = "epoch_moved"
    hint = "Try again."


class LeaseLost(Conflict):
    """This process no longer owns the lease of the conversation."""

    code = "lease_lost"
    hint = "The lease expired and another process ended the turn. Read the turn from the conversation."


class TenantExists(Conflict):
    """A tenant with this name already exists."""

    code = "tenant_exists"
    hint = "Choose another name, or use the existing tenant."


class TenantNotEmpty(Conflict):
    """The tenant already has conversations."""

    code = "tenant_not_empty"
    hint = "Choose another tenant, or pass --force."


class ConversationExists(Conflict):
    """A conversation with this id already exists."""

    code = "conversation_exists"
    hint = "Erase it first, or import with --new-ids."


class AssistantExists(Conflict):
    """Another assistant already has this id and version."""

    code = "assistant_exists"
    hint = "It belongs to another tenant or was created elsewhere. Import with --new-ids."


class ViewExists(Conflict):
    """A saved view with this name already exists."""

    code = "view_exists"
    hint = "Choose another name, or delete the existing view."


class ViewLimitReached(Conflict):
    """The tenant has the maximum number of saved views."""

    code = "view_limit_reached"
    hint = "Delete a view that is no longer needed."


class ReplayEnded(Conflict):
    """The replay has ended."""

    code = "replay_ended"
    hint = "Create a new replay. A replay that was stopped by its budget continues with a larger budget."


class ReplayBusy(Conflict):
    """The replay is running."""

    code = "replay_busy"
    hint = "Cancel the replay and wait until its running calls have ended."


class Unavailable(StrataError):
    """The server cannot do this now."""


class DatabaseUnavailable(Unavailable):
    """The database does not answer."""

    code = "database_unavailable"
    hint = "Try again in a moment. /readyz and `strata doctor` show operators the cause."


class SchemaBehind(Unavailable):
    """The database schema is older than this release requires."""

    code = "schema_behind"
    hint = "Run `strata migrate up`."


class SchemaAhead(Unavailable):
    """The database schema is newer than this release supports."""

    code = "schema_ahead"
    hint = "Run the release that migrated the database, or a later one."


class CheckTimedOut(Unavailable):
    """A readiness check did not finish in time."""

    code = "check_timed_out"
    hint = "Try again in a moment. `strata doctor` runs more detailed checks."


class SummaryUnavailable(Unavailable):
    """The oldest history has to be summarised, and the provider did not return a summary yet."""

    code = "summary_unavailable"
    hint = "No action is needed: it is retried automatically, and the conversation continues meanwhile."


class TemplateWorkersBusy(Unavailable):
    """No template worker became free in time."""

    code = "template_workers_busy"
    hint = "Try again in a moment. Operators can raise STRATA_TEMPLATE_WORKERS or STRATA_TEMPLATE_WAIT_SECONDS."


class TurnInterrupted(Unavailable):
    """The server stopped while the turn was running. The input and the output received so far are kept."""

    code = "turn_interrupted"
    hint = "Send the next message to continue. The provider call is not repeated automatically."


class TurnStalled(Unavailable):
    """The provider finished its answer, but the server did not end the turn in time."""

    code = "turn_stalled"
    hint = "Read the turn again in a moment. If its answer could not be stored, another process ends it as interrupted."


class AnswerUnstorable(Unavailable):
    """The answer contains a value that cannot be stored. The turn has no content; the call keeps the raw bytes."""

    code = "answer_unstorable"
    hint = "Send the next message to continue. The log event `turn.answer_unstorable` has the reason."


class AnswerUnreadable(Unavailable):
    """The server stopped while the turn was running, and the received bytes cannot be decoded. The call keeps them."""

    code = "answer_unreadable"
    hint = "Send the next message to continue. The log event `turn.answer_unreadable` has the reason."


class BodyBudgetExhausted(Unavailable):
    """The server is already reading the maximum total size of request bodies."""

    code = "body_budget_exhausted"
    hint = "Try again after `Retry-After`. Operators can raise STRATA_BODY_TOTAL_BYTES."


class ConnectionLimitReached(Unavailable):
    """The server has the maximum number of open connections."""

    code = "connection_limit_reached"
    hint = "Try again in a moment. Operators can raise STRATA_MAX_CONNECTIONS."


class ShuttingDown(Unavailable):
    """This server process is shutting down."""

    code = "shutting_down"
    hint = "Send the request again; another process will accept it."


class Setup(StrataError):
    """The configuration of this machine has to be changed first."""


class SettingsInvalid(Setup):
    """A setting has a value that is not allowed."""

    code = "settings_invalid"
    hint = "docs/reference/settings.md lists the settings and their values."


class DatabaseUnsupported(Setup):
    """Strata cannot run on this database."""

    code = "database_unsupported"
    hint = "Use PostgreSQL 15 or newer with a UTF-8 database."


class DataDirectoryForbidden(Setup):
    """The data directory cannot be read or written."""

    code = "data_directory_forbidden"
    hint = "Choose another directory with STRATA_DATA_DIR, or correct its owner and mode."


class DataDirectoryIncompatible(Setup):
    """The data directory belongs to another major version of PostgreSQL."""

    code = "data_directory_incompatible"
    hint = "Choose another directory with STRATA_DATA_DIR, or use the release that created it."


class DiskFull(Setup):
    """The disk of the data directory is full."""

    code = "disk_full"
    hint = "Free some space, or choose another directory with STRATA_DATA_DIR."


class EmbeddedStartFailed(Setup):
    """The embedded Postgres did not start."""

    code = "embedded_start_failed"
    hint = "Read its log in the data directory. `strata doctor` checks for common causes."


class MigrationFailed(Setup):
    """A migration failed."""

    code = "migration_failed"
    hint = "The failed step was rolled back. Correct the cause and run `strata migrate up` again."


class AddressInUse(Setup):
    """Another program uses this address."""

    code = "address_in_use"
    hint = "Choose another port with --port, STRATA_PORT, or PORT= for make."


class ProviderFailed(StrataError):
    """The provider call failed."""


class ProviderNotConfigured(ProviderFailed):
    """This server has no API key for the provider of the assistant."""

    code = "provider_not_configured"
    hint = "Set GEMINI_API_KEY or ANTHROPIC_API_KEY on the server, or use an assistant with another provider."


class ProviderRateLimited(ProviderFailed):
    """The provider's rate limit is reached."""

    code = "provider_rate_limited"
    hint = "Try again after `retry_after_seconds`, if it is present."


class ProviderQuotaExceeded(ProviderFailed):
    """The provider account has no quota left."""

    code = "provider_quota_exceeded"
    hint = "Raise the limit of the account. Waiting does not help."


class ProviderOverloaded(ProviderFailed):
    """The provider is overloaded."""

    code = "provider_overloaded"
    hint = "Try again in a moment."


class ProviderUnavailable(ProviderFailed):
    """The provider cannot be reached, or failed with a server error."""

    code = "provider_unavailable"
    hint = "Try again in a moment."


class ProviderTimedOut(ProviderFailed):
    """The provider did not respond in time."""

    code = "provider_timed_out"
    hint = "Try again. Operators can raise the timeouts of provider calls."


class ProviderDisconnected(ProviderFailed):
    """The connection to the provider closed in the middle of the answer."""

    code = "provider_disconnected"
    hint = "The output received so far is kept with the turn. Try again."


class ProviderEndedEarly(ProviderFailed):
    """The provider's stream ended before the model had finished."""

    code = "provider_ended_early"
    hint = "The output received so far is kept with the turn. Try again."


class ProviderEmpty(ProviderFailed):
    """The model finished without any output."""

    code = "provider_empty"
    hint = "Try again, or rephrase the message."


class ProviderMalformed(ProviderFailed):
    """The provider's response cannot be decoded."""

    code = "provider_malformed"
    hint = "The raw bytes are kept with the call. Try again."


class ProviderCallMalformed(ProviderFailed):
    """The model produced a tool call that cannot be parsed."""

    code = "provider_call_malformed"
    hint = "The raw bytes are kept with the call. Send the next message to continue. Simpler tool schemas help."


class ProviderRejected(ProviderFailed):
    """The provider rejected the request."""

    code = "provider_rejected"
    hint = "`provider_message` contains the provider's own message."


class ProviderAuthentication(ProviderFailed):
    """The provider rejected the credentials."""

    code = "provider_authentication"
    hint = "Check the provider's API key on the server."


class ContextTooLong(ProviderFailed):
    """The request exceeds the model's context window."""

    code = "context_too_long"
    hint = "Compact the conversation, or send a shorter message."


class SignatureRejected(ProviderFailed):
    """The provider rejected a signature in the history."""

    code = "signature_rejected"
    hint = "Send the message again: rejected signatures are left out from then on."


class AnswerRejected(ProviderFailed):
    """The provider rejected a part of one of its own answers in the history."""

    code = "answer_rejected"
    hint = "Send the message again: the rejected part is left out from then on."


class PrefixMismatch(ProviderFailed):
    """The provider rejected thinking because it was created with a different prefix."""

    code = "prefix_mismatch"
    hint = "Send the message again: the rejected thinking is left out from then on."


class SummaryRejected(ProviderFailed):
    """The provider rejected the signed summary at the start of the conversation."""

    code = "summary_rejected"
    hint = "Send the message again: the summary is sent as text from then on."


class CallLimitReached(ProviderFailed):
    """This server has the maximum number of concurrent provider calls, and none ended in time."""

    code = "call_limit_reached"
    hint = "Try again after `Retry-After`. Operators can raise STRATA_PROVIDER_CALL_LIMIT or add servers."


class CacheGone(ProviderFailed):
    """The explicit cache that the request named has expired or was deleted."""

    code = "cache_gone"
    hint = "No action is needed: the request is sent again without the cache."


class Internal(StrataError):
    """An internal error occurred."""

    code = "internal"
    hint = "Operators find the details in the server's log under this request id."


def every_error(root: type[StrataError] = StrataError) -> Iterator[type[StrataError]]:
    """Yield all classes that have a code, in the order of the tree."""
    for child in root.__subclasses__():
        if child.code:
            yield child
        yield from every_error(child)
