"""Facts about a conversation: what lists and filters for operators show, counted behind the turns."""

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFacts:
    """What operators ask of a conversation, as far as it is counted."""

    through_seq: int = 0
    """The newest turn that is counted."""
    through_background: int = 0
    """The lowest number of a counted call that belongs to no turn."""
    turn_count: int = 0
    call_count: int = 0
    models: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    stop_reasons: tuple[str, ...] = ()
    error_codes: tuple[str, ...] = ()
    tool_names: tuple[str, ...] = ()
    has_repairs: bool = False
    has_missing_signature: bool = False
    has_withheld_signature: bool = False
    has_prefix_break: bool = False
    was_reaped: bool = False
    usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal = Decimal(0)
    """Of the calls whose price is known."""
    unpriced_count: int = 0
    slowest_call_ms: int | None = None
    last_activity_at: datetime
    excerpt: str = ""
    """How the first user task begins."""
