"""`strata inspect`: conversations, timelines and calls in the terminal."""

import sys
from collections.abc import Callable
from typing import Any, Final

import click
from pydantic import BaseModel

from server.app.database import open_database
from server.app.settings import Settings
from server.cli.inspect_screen import show_call, show_list, show_timeline
from server.cli.parameters import Amount, TimeParam
from server.cli.run import begin_quietly, run
from server.cli.tenants import load_tenant_id
from server.cli.terminal import open_console
from server.conversation.page import PAGE_LIMIT
from server.conversation.turn import StopReason
from server.inspection.calls import CallInspector, InspectedCall
from server.inspection.conversation_list import InspectedState, InspectionFilter, InspectionPage
from server.inspection.timeline import TIMELINE_LIMIT, Timeline
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.store import PostgresStore
from server.providers.token_estimate import TokenEstimate
from server.providers.wire.frames import read_frames
from server.web.api.call_views import CallView
from server.web.api.inspection_views import InspectionPageView, TimelineView
from server.web.json_text import encode_json

_FLAGS: Final = {
    "has_repairs": "A request needed repairs of the history.",
    "has_missing_signature": "A tool call lacks a required signature.",
    "has_withheld_signature": "Signatures were withheld from another model.",
    "has_prefix_break": "A request did not begin like the previous one.",
    "was_recovered": "A turn was ended by another process.",
}
_NAMES: Final = {
    "assistant": ("assistant_id", "Assistant id (asst_...)."),
    "model": ("model", "Model that answered."),
    "provider": ("provider", "Provider that answered: gemini or anthropic."),
    "error": ("error_code", "Error code."),
    "tool": ("tool_name", "Tool that was called."),
    "text": ("text", "Words that one turn contains; -word excludes."),
    "phrase": ("phrase", "Literal text of one turn."),
}


def _filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the filters of the list as options."""
    options = [
        *(click.option(f"--{name}", field, help=text) for name, (field, text) in _NAMES.items()),
        click.option(
            "--state", type=click.Choice([state.value for state in InspectedState]), help="State of any answer."
        ),
        click.option("--stop-reason", type=click.Choice([reason.value for reason in StopReason])),
        *(click.option(f"--{flag.replace('_', '-')}", flag, is_flag=True, help=text) for flag, text in _FLAGS.items()),
        click.option("--cost-from", type=Amount(), help="Minimum cost in USD."),
        click.option("--cost-to", type=Amount(), help="Maximum cost in USD."),
        click.option("--tokens-from", type=click.IntRange(0), help="Minimum number of tokens."),
        click.option("--tokens-to", type=click.IntRange(0), help="Maximum number of tokens."),
        click.option("--from", "active_after", type=TimeParam(), help="Newest turn since: 2026-11-01, or 7d ago."),
        click.option("--to", "active_before", type=TimeParam(), help="Newest turn before."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def inspect() -> None:
    """Inspect conversations: find them, read them, and see exactly what was sent.

    Reads the database of the settings, for all tenants. A running server or worker updates the lists a few seconds
    after each turn.

    \b
    Examples:
      strata inspect list --error provider_overloaded --from 7d
      strata inspect list --text "refund -invoice" --tenant acme
      strata inspect conversation conv_01jd0z8s3bf6h9kq2m4n6p8r0t --around 40
      strata inspect call conv_01jd0z8s3bf6h9kq2m4n6p8r0t 42
    """  # noqa: D301  reason: click's mark for lines that stay as they are


@inspect.command("list")
@_filter_options
@click.option("--tenant", help="Only this tenant.  [all]")
@click.option(
    "--limit", type=click.IntRange(1, PAGE_LIMIT), default=20, show_default=True, help="Maximum number of rows."
)
@click.option("--cursor", help="Cursor of the previous page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as /admin/api/conversations returns it.")
def list_(tenant: str | None, limit: int, cursor: str | None, *, as_json: bool, **filters: Any) -> None:
    """List conversations, latest activity first. All filters can be combined."""
    state, stop_reason = filters.pop("state"), filters.pop("stop_reason")
    wanted = InspectionFilter(
        **filters,
        state=None if state is None else InspectedState(state),
        stop_reason=None if stop_reason is None else StopReason(stop_reason),
    )
    page = run(_list(begin_quietly(), tenant, wanted, cursor, limit))
    if as_json:
        _print_json(InspectionPageView.of(page))
    else:
        show_list(open_console(), page)


@inspect.command()
@click.argument("conversation_id")
@click.option("--after", "after_seq", type=click.IntRange(0), help="Turns after this one.")
@click.option("--around", "around_seq", type=click.IntRange(0), help="Turns around this one.")
@click.option(
    "--limit", type=click.IntRange(1, TIMELINE_LIMIT), default=20, show_default=True, help="Maximum number of turns."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as /admin/api returns it.")
def conversation(
    conversation_id: str, after_seq: int | None, around_seq: int | None, limit: int, *, as_json: bool
) -> None:
    """Show the newest turns of a conversation, or those at a position."""
    if after_seq is not None and around_seq is not None:
        raise click.UsageError("Use --after or --around, not both.")
    timeline = run(_load(begin_quietly(), conversation_id, after_seq, around_seq, limit))
    if as_json:
        _print_json(TimelineView.of(timeline))
    else:
        show_timeline(open_console(), timeline)


@inspect.command(context_settings={"ignore_unknown_options": True})
@click.argument("conversation_id")
@click.argument("turn_seq", type=int)
@click.argument("attempt", type=int, default=1)
@click.option("--request", "part", flag_value="request", help="Print the bytes of the rebuilt request.")
@click.option("--response", "part", flag_value="response", help="Print the bytes of the raw response.")
@click.option("--json", "part", flag_value="json", help="Print JSON, as /admin/api returns it.")
def call(conversation_id: str, turn_seq: int, attempt: int, part: str | None) -> None:
    """Show a call: outcome, proof of the request, cache, cost, layers, signatures and answer."""
    found = run(_inspect(begin_quietly(), conversation_id, turn_seq, attempt))
    match part:
        case "json":
            _print_json(CallView.of(found))
        case "request":
            _print_bytes(found.request.body)
        case "response":
            _print_bytes(None if found.call.end is None else found.call.end.raw_response)
        case _:
            show_call(open_console(), found)


async def _list(
    settings: Settings, tenant: str | None, filters: InspectionFilter, cursor: str | None, limit: int
) -> InspectionPage:
    async with open_database(settings) as database:
        tenant_id = await load_tenant_id(database, tenant)
        inspector = PostgresInspector(database)
        return await inspector.list_conversations(tenant_id, filters=filters, cursor=cursor, limit=limit)


async def _load(
    settings: Settings, conversation_id: str, after_seq: int | None, around_seq: int | None, limit: int
) -> Timeline:
    async with open_database(settings) as database:
        return await PostgresInspector(database).load_timeline(
            None, conversation_id, after_seq=after_seq, around_seq=around_seq, limit=limit
        )


async def _inspect(settings: Settings, conversation_id: str, turn_seq: int, attempt: int) -> InspectedCall:
    from server.app.providers import open_offline_providers  # noqa: PLC0415  reason: only calls need the SDKs

    async with open_database(settings) as database, open_offline_providers(settings) as offline_providers:
        inspector = CallInspector(
            PostgresInspector(database), PostgresStore(database), offline_providers, read_frames, TokenEstimate()
        )
        return await inspector.inspect_call(None, conversation_id, turn_seq, attempt)


def _print_json(view: BaseModel) -> None:
    click.echo(encode_json(view.model_dump()))


def _print_bytes(data: bytes | None) -> None:
    if data is None:
        raise click.ClickException("There are no bytes to print.")
    if sys.stdout.isatty():
        raise click.UsageError("The bytes may contain control characters: redirect them to a file or a pipe.")
    sys.stdout.buffer.write(data)
