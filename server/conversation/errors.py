"""Everything that can go wrong, as one tree.

    StrataError
    ├── Invalid                     the request itself is wrong; sending it again cannot help
    │   ├── ValidationFailed        a field has a value that is not allowed
    │   ├── RequestMalformed        the bytes on the connection are not HTTP/1.1
    │   ├── RequestHeadTooLarge     the request line and the headers are longer, or more, than the server takes
    │   ├── RequestHeadTimedOut     the request line and the headers were not sent in time
    │   ├── BodyMalformed           the body is not the JSON it claims to be
    │   ├── BodyTooLarge            the body is longer than the server takes
    │   ├── BodyTimedOut            the body was not sent in time
    │   ├── MediaTypeUnsupported    the body is of a kind that the route does not read
    │   ├── MethodNotAllowed        the route exists, the method does not
    │   ├── CursorInvalid           a page cursor that this server did not make
    │   ├── HistoryRuleBroken       the turn would make a history that no provider accepts
    │   ├── TemplateInvalid         an instruction that does not parse, or that depends on the clock
    │   ├── ArchiveInvalid          a file to import that is cut off, altered, or no archive
    │   └── PriceUnknown            a budget in money for a model without a price
    ├── Refused                     who is asking
    │   ├── KeyRejected             no key, an unknown one, an expired or a revoked one
    │   ├── ScopeMissing            a good key without the scope for this route
    │   ├── OtherTenantReadOnly     a superadmin that would change something of another tenant
    │   ├── RateLimited             a good key that asks too often
    │   ├── SessionEnded            no session of an operator, or one that is over
    │   ├── LoginLocked             too many wrong secrets for this key from this address
    │   └── RequestForged           a form that was not sent from a page of this session
    ├── NotFound                    it does not exist, or it belongs to another tenant
    │   ├── RouteNotFound
    │   ├── TenantNotFound
    │   ├── ApiKeyNotFound
    │   ├── AssistantNotFound
    │   ├── ConversationNotFound
    │   ├── TurnNotFound
    │   ├── CallNotFound
    │   ├── RawBytesRemoved         retention has removed the bytes of a call
    │   ├── ImageNotFound
    │   ├── CompactionNotFound      there is nothing to undo
    │   ├── ViewNotFound
    │   └── ReplayNotFound          also for an item or a result of one
    ├── Conflict                    right in itself, wrong against the present state
    │   ├── ConversationBusy        another turn is running
    │   ├── QueueFull               too many turns wait for the conversation already
    │   ├── TurnNotRunning          there is nothing to cancel
    │   ├── RevisionMismatch        the client has not seen the newest revision
    │   ├── AssistantRevised        somebody saved the assistant meanwhile
    │   ├── IdempotencyKeyReused    the same key came with another body
    │   ├── EpochMoved              the static layer changed meanwhile
    │   ├── LeaseLost               the writer no longer owns the conversation
    │   ├── TenantExists            a tenant of that name is there already
    │   ├── TenantOccupied          a tenant that had to be empty has conversations
    │   ├── ConversationExists      a conversation to import is there already
    │   ├── AssistantExists         another assistant has the id and version of one to import
    │   ├── ViewExists              a saved view of that name is there already
    │   ├── ViewLimitReached        a tenant keeps no more saved views
    │   ├── ReplayEnded             a replay that cannot go on
    │   └── ReplayBusy              a replay that has to rest first
    ├── Unavailable                 true now, perhaps not in a moment
    │   ├── DatabaseUnavailable     Postgres does not answer
    │   ├── SchemaBehind            the database is older than this release
    │   ├── SchemaAhead             the database is newer than this release
    │   ├── CheckTimedOut           something that the server depends on did not say in time how it is
    │   ├── SummaryUnavailable      the oldest history could not be summed up for now
    │   ├── TemplateWorkersBusy     no process to render a template became free in time
    │   ├── TurnInterrupted         the process that ran the turn died; what had arrived is kept
    │   ├── TurnStalled             the provider had ended, and the turn did not end in time
    │   ├── AnswerUnstorable        the answer could not be stored as it came; its bytes are kept
    │   ├── AnswerUnreadable        an interrupted answer whose bytes cannot be read; they are kept
    │   ├── BodyBudgetExhausted     the server reads as many bytes of bodies as it may at the same time
    │   ├── ConnectionLimitReached  the server has as many connections as it takes
    │   └── ShuttingDown            this process takes no new work
    ├── Setup                       the operator has to change something before it can start
    │   ├── SettingsInvalid
    │   ├── DatabaseUnsupported     a Postgres that is too old, or not UTF-8
    │   ├── DataDirectoryForbidden  the data directory cannot be read or written
    │   ├── DataDirectoryForeign    the data directory is of another PostgreSQL major version
    │   ├── DiskFull
    │   ├── EmbeddedStartFailed     the embedded Postgres did not come up
    │   ├── MigrationFailed
    │   └── AddressInUse
    ├── ProviderFailed              the model's provider, or the way to it
    │   ├── ProviderNotConfigured   this server has no key for it
    │   ├── ProviderRateLimited     too many requests; says for how long, where the provider does
    │   ├── ProviderQuotaExceeded   the account has no budget left; waiting does not help
    │   ├── ProviderOverloaded      the provider has no capacity
    │   ├── ProviderUnavailable     a fault of the provider, or no connection to it
    │   ├── ProviderTimedOut        nothing came for too long
    │   ├── ProviderCut             the connection ended in the middle
    │   ├── ProviderEndedEarly      the stream ended properly but before the model had finished
    │   ├── ProviderEmpty           the model finished without saying anything
    │   ├── ProviderMalformed       what came is not what the provider documents
    │   ├── ProviderCallMalformed   the model began a tool call that cannot be parsed
    │   ├── ProviderRejected        the provider refused the request as wrong
    │   ├── ProviderAuthentication  the provider refused the credentials
    │   ├── ContextTooLong          the request is larger than the model's window
    │   ├── SignatureRejected       the provider refused a signature in the history
    │   ├── AnswerRejected          the provider refused a part of an answer of its own
    │   ├── PrefixMismatch          thinking came back behind another history than it was made behind
    │   ├── SummaryRejected         the provider refused a summary that it had signed
    │   ├── CallLimitReached        this server makes as many provider calls as it may at the same time
    │   └── CacheGone               an explicit cache is expired or deleted
    └── Internal                    a bug of ours; its text never reaches a client

Each leaf has a `code`, which is public API: it is never renamed. The docstring of a class is its message when none is
given, so the two cannot drift apart. `hint` says what to do about it. The mapping of codes to HTTP statuses lives in
`web/errors.py`, the one to exit codes in `cli/exit_codes.py`; nothing here knows of either.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar


class StrataError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = ""
    hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, hint: str = "", **details: object) -> None:
        """`details` are machine-readable facts for the client; they never hold content or secrets."""
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.advice = hint or type(self).hint
        self.details: Mapping[str, object] = details
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".strip()


class Invalid(StrataError):
    """The request is wrong."""


class ValidationFailed(Invalid):
    """A field of the request has a value that is not allowed."""

    code = "validation_failed"
    hint = "Correct the fields listed in `errors` and send the request again."


class RequestMalformed(Invalid):
    """The request is not valid HTTP/1.1."""

    code = "request_malformed"
    hint = "Send the request with an HTTP client library; other protocols are not served on this port."


class RequestHeadTooLarge(Invalid):
    """The request line and the headers are larger than this server accepts."""

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
    """The request body is larger than this server accepts."""

    code = "body_too_large"
    hint = "Send less at once, or raise STRATA_BODY_LIMIT_BYTES on the server."


class BodyTimedOut(Invalid):
    """The request body did not arrive in time."""

    code = "body_timed_out"
    hint = "Send the request again; operators can raise STRATA_BODY_SECONDS."


class MediaTypeUnsupported(Invalid):
    """The route does not read a body of this content type."""

    code = "media_type_unsupported"
    hint = "Send `Content-Type: application/json`."


class MethodNotAllowed(Invalid):
    """The route does not answer this HTTP method."""

    code = "method_not_allowed"
    hint = "The `Allow` header lists the methods that it answers; /schema describes all routes."


class CursorInvalid(Invalid):
    """The page cursor was not made by this server."""

    code = "cursor_invalid"
    hint = "Start from the first page, without a cursor."


class HistoryRuleBroken(Invalid):
    """The turn would make a history that no provider accepts."""

    code = "history_rule_broken"
    hint = "See `rule` and the ids beside it; GET the conversation to see its pending tool calls."


class TemplateInvalid(Invalid):
    """An instruction of the assistant is no template that can be used."""

    code = "template_invalid"
    hint = "See `template` and `line`; instructions may use assistant, conversation, session, args and variables."


class ArchiveInvalid(Invalid):
    """The file is no whole archive of conversations."""

    code = "archive_invalid"
    hint = "Export it again; a newer release may have made it. Nothing of it was imported."


class PriceUnknown(Invalid):
    """The model has no known price, so a budget in money cannot be held."""

    code = "price_unknown"
    hint = "Give the budget in tokens instead."


class Refused(StrataError):
    """The caller may not do this."""


class KeyRejected(Refused):
    """The API key is missing, unknown, expired or revoked."""

    code = "key_rejected"
    hint = "Send `Authorization: Bearer <key>` with a key made by `strata keys create`."


class ScopeMissing(Refused):
    """The API key lacks the scope for this route."""

    code = "scope_missing"
    hint = "Use a key that has the scope named in `scope`."


class OtherTenantReadOnly(Refused):
    """This belongs to another tenant. A superadmin key reads the data of other tenants and changes nothing there."""

    code = "other_tenant_read_only"
    hint = "Use an admin key of the tenant that it belongs to."


class RateLimited(Refused):
    """The key has used up its requests for now."""

    code = "rate_limited"
    hint = "Wait for as long as `Retry-After` says; operators can raise STRATA_RATE_LIMIT_PER_MINUTE."


class SessionEnded(Refused):
    """You are not logged in, or your session is over."""

    code = "session_ended"
    hint = "Log in at /admin/login with an admin key; programs use /admin/api with the key itself."


class LoginLocked(Refused):
    """Too many logins with this key have failed from this address, and this one failed too."""

    code = "login_locked"
    hint = "Check the key: the right one works at any time. Attempts with a wrong one are refused until `Retry-After`."


class RequestForged(Refused):
    """The form was not sent from a page of this session."""

    code = "request_forged"
    hint = "Load the page again and repeat what you did there."


class NotFound(StrataError):
    """It does not exist."""


class RouteNotFound(NotFound):
    """There is no such route."""

    code = "route_not_found"
    hint = "/schema describes all routes."


class TenantNotFound(NotFound):
    """There is no tenant of this name."""

    code = "tenant_not_found"
    hint = "`strata keys list` shows the tenants; `strata keys create --tenant NAME` makes one."


class ApiKeyNotFound(NotFound):
    """There is no API key of this id."""

    code = "api_key_not_found"
    hint = "`strata keys list` shows the ids."


class AssistantNotFound(NotFound):
    """There is no assistant of this id and version."""

    code = "assistant_not_found"
    hint = "List the assistants to see their ids and newest versions."


class ConversationNotFound(NotFound):
    """There is no conversation of this id."""

    code = "conversation_not_found"
    hint = "List the conversations to see their ids; it may have been erased."


class TurnNotFound(NotFound):
    """The conversation has no turn of this number."""

    code = "turn_not_found"
    hint = "List the conversation's turns to see their numbers."


class CallNotFound(NotFound):
    """The turn has no such provider call."""

    code = "call_not_found"
    hint = "List the calls of the turn to see its attempts."


class RawBytesRemoved(NotFound):
    """The raw bytes of a call that this one continues are gone."""

    code = "raw_bytes_removed"
    hint = "STRATA_RAW_RETENTION_DAYS says how long they are kept."


class ImageNotFound(NotFound):
    """There is no image of this hash in the conversation."""

    code = "image_not_found"
    hint = "The `sha256` of an image block names its bytes."


class CompactionNotFound(NotFound):
    """The conversation has no compaction that could be undone."""

    code = "compaction_not_found"
    hint = "List the conversation's compactions to see what there is."


class ViewNotFound(NotFound):
    """There is no such saved view."""

    code = "view_not_found"
    hint = "It may have been deleted; look at the list of saved views."


class ReplayNotFound(NotFound):
    """There is no such replay, or no such item or result in it."""

    code = "replay_not_found"
    hint = "List the replays to see which there are; the items of an erased conversation are gone with it."


class Conflict(StrataError):
    """The request does not fit the present state."""


class ConversationBusy(Conflict):
    """Another turn of this conversation is running."""

    code = "conversation_busy"
    hint = "Wait for it to end, or send `on_busy`: `queue` or `supersede`."


class QueueFull(Conflict):
    """Too many turns wait for this conversation already."""

    code = "queue_full"
    hint = "Try again later; operators can raise STRATA_QUEUE_LIMIT."


class TurnNotRunning(Conflict):
    """There is no running turn to cancel, or it is another one."""

    code = "turn_not_running"
    hint = "It has ended already; GET the conversation to see its state."


class RevisionMismatch(Conflict):
    """The conversation has moved on from the revision that the request expects."""

    code = "revision_mismatch"
    hint = "GET the conversation, look at what is new, and send again with its revision."


class AssistantRevised(Conflict):
    """The assistant has a newer version than the one that was edited."""

    code = "assistant_revised"
    hint = "Look at what is new, and save again over the newest version."


class IdempotencyKeyReused(Conflict):
    """This idempotency key was used before with another body."""

    code = "idempotency_key_reused"
    hint = "Use a new key for a new request."


class EpochMoved(Conflict):
    """Another epoch of the static layer began meanwhile, or a turn was accepted."""

    code = "epoch_moved"
    hint = "Load the conversation again and decide anew."


class LeaseLost(Conflict):
    """The conversation is no longer held by this writer."""

    code = "lease_lost"
    hint = "The lease expired and another process ended the turn; read it from the conversation."


class TenantExists(Conflict):
    """A tenant of this name is there already."""

    code = "tenant_exists"
    hint = "Choose another name, or use the tenant that is there."


class TenantOccupied(Conflict):
    """The tenant has conversations already."""

    code = "tenant_occupied"
    hint = "Choose another tenant, or say --force."


class ConversationExists(Conflict):
    """A conversation of this id is there already."""

    code = "conversation_exists"
    hint = "Erase it first, or import with --new-ids."


class AssistantExists(Conflict):
    """Another assistant has this id and version already."""

    code = "assistant_exists"
    hint = "It is another tenant's or was made elsewhere; import with --new-ids."


class ViewExists(Conflict):
    """A saved view of this name is there already."""

    code = "view_exists"
    hint = "Choose another name, or delete the view that is there."


class ViewLimitReached(Conflict):
    """There are as many saved views as a tenant may have."""

    code = "view_limit_reached"
    hint = "Delete one that nobody needs."


class ReplayEnded(Conflict):
    """The replay is over."""

    code = "replay_ended"
    hint = "Make a new one; one that its budget has stopped goes on with a larger budget."


class ReplayBusy(Conflict):
    """The replay is running."""

    code = "replay_busy"
    hint = "Cancel it and wait for the calls that are on their way."


class Unavailable(StrataError):
    """The server cannot do this now."""


class DatabaseUnavailable(Unavailable):
    """The database does not answer."""

    code = "database_unavailable"
    hint = "Try again in a moment; operators see the cause in /readyz and `strata doctor`."


class SchemaBehind(Unavailable):
    """The database schema is older than this release needs."""

    code = "schema_behind"
    hint = "Run `strata migrate up`."


class SchemaAhead(Unavailable):
    """The database schema is newer than this release knows."""

    code = "schema_ahead"
    hint = "Run the release that migrated it, or a later one."


class CheckTimedOut(Unavailable):
    """A readiness check did not end in time."""

    code = "check_timed_out"
    hint = "Try again in a moment; `strata doctor` looks closer."


class SummaryUnavailable(Unavailable):
    """The oldest history has to be summed up, and the provider did not do it for now."""

    code = "summary_unavailable"
    hint = "It is tried again by itself; the conversation goes on meanwhile."


class TemplateWorkersBusy(Unavailable):
    """No worker process became free in time to render or check a template."""

    code = "template_workers_busy"
    hint = "Try again in a moment; operators can raise STRATA_TEMPLATE_WORKERS or STRATA_TEMPLATE_WAIT_SECONDS."


class TurnInterrupted(Unavailable):
    """The server stopped while it ran the turn. What had arrived is kept, and so is the input."""

    code = "turn_interrupted"
    hint = "Send the next message to go on; the provider is not asked again by itself."


class TurnStalled(Unavailable):
    """The provider had ended its answer, and the server did not end the turn in time."""

    code = "turn_stalled"
    hint = "Read the turn in a moment: if its answer could not be stored, another process ends it as interrupted."


class AnswerUnstorable(Unavailable):
    """The answer holds a value that could not be stored. The turn has no content; the call keeps every byte."""

    code = "answer_unstorable"
    hint = "Send the next message to go on. The log has `turn.answer_unstorable` with the reason."


class AnswerUnreadable(Unavailable):
    """The server stopped while it ran the turn, and what had arrived cannot be read. The call keeps every byte."""

    code = "answer_unreadable"
    hint = "Send the next message to go on. The log has `turn.answer_unreadable` with the reason."


class BodyBudgetExhausted(Unavailable):
    """The server reads as many large request bodies as it may at the same time."""

    code = "body_budget_exhausted"
    hint = "Try again after `Retry-After`; operators can raise STRATA_BODY_TOTAL_BYTES."


class ConnectionLimitReached(Unavailable):
    """The server has as many open connections as it accepts."""

    code = "connection_limit_reached"
    hint = "Try again in a moment, or raise STRATA_MAX_CONNECTIONS on the server."


class ShuttingDown(Unavailable):
    """This server process is shutting down."""

    code = "shutting_down"
    hint = "Send the request again; another process will take it."


class Setup(StrataError):
    """Something on this machine has to change first."""


class SettingsInvalid(Setup):
    """A setting has a value that is not allowed."""

    code = "settings_invalid"
    hint = "docs/reference/settings.md lists the settings and what they take."


class DatabaseUnsupported(Setup):
    """The database is not one that Strata can run on."""

    code = "database_unsupported"
    hint = "Use PostgreSQL 15 or newer with a UTF-8 database."


class DataDirectoryForbidden(Setup):
    """The data directory cannot be used."""

    code = "data_directory_forbidden"
    hint = "Choose another with STRATA_DATA_DIR, or correct its owner and mode."


class DataDirectoryForeign(Setup):
    """The data directory belongs to another major version of PostgreSQL."""

    code = "data_directory_foreign"
    hint = "Choose another with STRATA_DATA_DIR, or use the release that made it."


class DiskFull(Setup):
    """The disk under the data directory is full."""

    code = "disk_full"
    hint = "Free some space, or choose another place with STRATA_DATA_DIR."


class EmbeddedStartFailed(Setup):
    """The embedded Postgres did not start."""

    code = "embedded_start_failed"
    hint = "Its log lies in the data directory; `strata doctor` looks for common causes."


class MigrationFailed(Setup):
    """A migration did not go through."""

    code = "migration_failed"
    hint = "Nothing of the failed step was kept. Correct the cause and run `strata migrate up` again."


class AddressInUse(Setup):
    """The address is taken by another program."""

    code = "address_in_use"
    hint = "Choose another port with --port, STRATA_PORT, or PORT= for make."


class ProviderFailed(StrataError):
    """The provider failed."""


class ProviderNotConfigured(ProviderFailed):
    """This server has no key for the assistant's provider."""

    code = "provider_not_configured"
    hint = "Set GEMINI_API_KEY or ANTHROPIC_API_KEY on the server, or use an assistant of another provider."


class ProviderRateLimited(ProviderFailed):
    """The provider takes no more requests for now."""

    code = "provider_rate_limited"
    hint = "Try again after `retry_after_seconds`, where it is given."


class ProviderQuotaExceeded(ProviderFailed):
    """The account at the provider has no budget left."""

    code = "provider_quota_exceeded"
    hint = "Raise the limit of the account; waiting does not help."


class ProviderOverloaded(ProviderFailed):
    """The provider is overloaded."""

    code = "provider_overloaded"
    hint = "Try again in a moment."


class ProviderUnavailable(ProviderFailed):
    """The provider cannot be reached, or failed on its side."""

    code = "provider_unavailable"
    hint = "Try again in a moment."


class ProviderTimedOut(ProviderFailed):
    """The provider did not answer in time."""

    code = "provider_timed_out"
    hint = "Try again; operators can raise the limits of time."


class ProviderCut(ProviderFailed):
    """The connection to the provider broke in the middle of the answer."""

    code = "provider_cut"
    hint = "What had arrived is kept with the turn. Try again."


class ProviderEndedEarly(ProviderFailed):
    """The provider's stream ended before the model had finished."""

    code = "provider_ended_early"
    hint = "What had arrived is kept with the turn. Try again."


class ProviderEmpty(ProviderFailed):
    """The model finished without saying anything."""

    code = "provider_empty"
    hint = "Try again, or say it differently."


class ProviderMalformed(ProviderFailed):
    """The provider's answer cannot be read."""

    code = "provider_malformed"
    hint = "Its bytes are kept with the call; try again."


class ProviderCallMalformed(ProviderFailed):
    """The model made a tool call that cannot be parsed."""

    code = "provider_call_malformed"
    hint = "Its bytes are kept with the call. Send the next message to go on; simpler tool schemas help."


class ProviderRejected(ProviderFailed):
    """The provider refused the request."""

    code = "provider_rejected"
    hint = "The provider's own words are in `provider_message`."


class ProviderAuthentication(ProviderFailed):
    """The provider refused the credentials."""

    code = "provider_authentication"
    hint = "Check the provider's key on the server."


class ContextTooLong(ProviderFailed):
    """The request is larger than the model's window."""

    code = "context_too_long"
    hint = "Compact the conversation, or send less."


class SignatureRejected(ProviderFailed):
    """The provider refused a signature in the history."""

    code = "signature_rejected"
    hint = "Send the message again: the conversation goes on without the signatures that were rejected."


class AnswerRejected(ProviderFailed):
    """The provider refused a part of one of its own answers in the history."""

    code = "answer_rejected"
    hint = "Send the message again: the conversation goes on without the part that was rejected."


class PrefixMismatch(ProviderFailed):
    """The provider found thinking behind another history than it was made behind."""

    code = "prefix_mismatch"
    hint = "Send the message again: the conversation goes on without the thinking that was rejected."


class SummaryRejected(ProviderFailed):
    """The provider refused the signed summary that the conversation begins with."""

    code = "summary_rejected"
    hint = "Send the message again: the conversation goes on with the text of the summary."


class CallLimitReached(ProviderFailed):
    """This server makes as many provider calls at the same time as it may, and none ended in time."""

    code = "call_limit_reached"
    hint = "Try again after `Retry-After`; operators can raise STRATA_PROVIDER_CALL_LIMIT or add servers."


class CacheGone(ProviderFailed):
    """The provider no longer has the cache that the request named."""

    code = "cache_gone"
    hint = "The request is sent again without it."


class Internal(StrataError):
    """Something went wrong inside the server."""

    code = "internal"
    hint = "The server's log has the details under this request id."


def every_error(root: type[StrataError] = StrataError) -> Iterator[type[StrataError]]:
    """All classes that have a code, in the order of the tree."""
    for child in root.__subclasses__():
        if child.code:
            yield child
        yield from every_error(child)
