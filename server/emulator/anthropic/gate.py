"""The way of a request through all checks. What comes out may be answered."""

from dataclasses import dataclass
from typing import Any

from server.emulator.anthropic import compaction
from server.emulator.anthropic.binding import Bound, check_thinking
from server.emulator.anthropic.cache_markers import PromptItem, list_items, read_ttls
from server.emulator.anthropic.caller import Caller
from server.emulator.anthropic.desk import Desk
from server.emulator.anthropic.errors import invalid
from server.emulator.anthropic.input_tokens import count_items
from server.emulator.anthropic.message_rules import check_ending, check_messages
from server.emulator.anthropic.model_rules import check_model_rules, load_model
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prefix import Opening, Prefix, close_prefix, open_prefix
from server.emulator.anthropic.schema import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that breaks no rule, and what the checks found out about it."""

    body: dict[str, Any]
    caller: Caller
    model: Model
    opening: Opening
    start: Prefix
    end: Prefix
    """What stands before the answer."""
    bound: Bound
    items: list[PromptItem]
    ttls: dict[str, str]
    tokens: dict[str, int]
    """What each item costs, by path."""

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def wants_compaction(self) -> bool:
        return self.body.get("compaction") is not None


def admit(body: Any, caller: Caller, desk: Desk, *, counting: bool) -> Admitted:
    """Raises `Refused` with the first problem found."""
    check_fields(body, caller, counting=counting)
    model = load_model(body["model"])
    if body.get("thread") is not None:
        raise invalid("thread: message threads are not emulated", error_code="thread_unsupported_request")
    opening = open_prefix(body)
    start = compaction.find_start(body, caller, signer=desk.state.signer, opening=opening)
    end = close_prefix(body["messages"], start)
    _check_shape_of_talk(body, model, caller, is_paused=end.digest in desk.paused, counting=counting)
    check_model_rules(body, model, caller)
    items = list_items(body)
    ttls = read_ttls(body, items)
    bound = check_thinking(
        body, model, caller, signer=desk.state.signer, opening=opening, start=start, issued=desk.issued
    )
    tokens = count_items(items, body["messages"], model, bound)
    if (total := sum(tokens.values())) > model.max_input_tokens:
        raise invalid(f"prompt is too long: {total} tokens > {model.max_input_tokens} maximum")
    return Admitted(
        body=body,
        caller=caller,
        model=model,
        opening=opening,
        start=start,
        end=end,
        bound=bound,
        items=items,
        ttls=ttls,
        tokens=tokens,
    )


def _check_shape_of_talk(
    body: dict[str, Any], model: Model, caller: Caller, *, is_paused: bool, counting: bool
) -> None:
    if body.get("compaction") is None or counting:
        check_messages(body, model, caller)
        check_ending(body, model, continues_paused_turn=is_paused)
    else:
        compaction.check_request(body, model, is_paused=is_paused)
        check_messages(body, model, caller)
