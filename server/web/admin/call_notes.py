"""What was recorded beside a call: repairs, template failures, warnings, signatures, headers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import CallStart
from server.inspection.call_explanation import explain_repair, explain_template, explain_warning, explain_withheld
from server.inspection.call_view import CallInspection
from server.inspection.json_outline import ReadableText, outline_json
from server.inspection.signature_report import PartSignature, SignatureState
from server.web.admin.page_budget import PageBudget, Window, open_window

_NOTES: Final = 20
_NOTE_BYTES: Final = 3_000
_SIGNATURES: Final = 40
_HEADERS: Final = 40
_HEADER_BYTES: Final = 500
_RANKS: Final = (
    SignatureState.MISSING,
    SignatureState.WITHHELD,
    SignatureState.PRESENT,
    SignatureState.UNSIGNED,
)
"""What is wrong stands first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownNote:
    """Something that was recorded with a call, and what it means."""

    group: str
    kind: str
    words: str
    details: ReadableText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSignature:
    """The signature of a part that was sent, or came."""

    is_received: bool
    part: PartSignature
    reason: str
    """Why it was withheld, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSignatures:
    """Signatures, what is wrong first, then the newest."""

    rows: Window[ShownSignature]
    counts: Mapping[SignatureState, int]


def show_notes(start: CallStart, budget: PageBudget) -> Window[ShownNote]:
    """All of them in one list."""
    notes = (
        *_explain("repair", start.repairs, explain_repair),
        *_explain("template failure", start.template_failures, explain_template),
        *_explain("warning", start.warnings, explain_warning),
    )
    window = open_window(notes, head=_NOTES, tail=_NOTES)
    return window.map(lambda note: _show_note(*note, budget))


def show_signatures(found: CallInspection) -> ShownSignatures:
    """Of the answers that the request sent back, and of the answer that came."""
    parts = [
        *((True, part) for part in found.received_signatures),
        *((False, part) for part in found.sent_signatures),
    ]
    ranked = sorted(parts, key=lambda pair: (_RANKS.index(pair[1].state), -pair[1].seq, pair[1].place))
    shown = [
        ShownSignature(is_received=is_received, part=part, reason=explain_withheld(part.reason) if part.reason else "")
        for is_received, part in ranked
    ]
    counts = Counter(part.state for _, part in parts)
    return ShownSignatures(
        rows=open_window(shown, head=_SIGNATURES, tail=0), counts={state: counts[state] for state in _RANKS}
    )


def show_headers(found: CallInspection, budget: PageBudget) -> tuple[tuple[str, str], ...]:
    """The headers of the response."""
    headers = {} if found.call.end is None else found.call.end.headers
    return tuple(
        (budget.fit_line(name[:_HEADER_BYTES], _HEADER_BYTES), budget.fit_line(value[:_HEADER_BYTES], _HEADER_BYTES))
        for name, value in list(headers.items())[:_HEADERS]
    )


def show_usage(found: CallInspection, budget: PageBudget) -> ReadableText | None:
    """The provider's own words about what it took."""
    reported = None if found.call.end is None else found.call.end.usage_reported
    return None if reported is None else budget.fit(outline_json(dict(reported), limit=_NOTE_BYTES), _NOTE_BYTES)


_Explained = tuple[str, Mapping[str, JsonValue], str]


def _explain(
    group: str, notes: Sequence[Mapping[str, JsonValue]], explain: Callable[[Mapping[str, JsonValue]], str]
) -> list[_Explained]:
    return [(group, note, explain(note)) for note in notes]


def _show_note(group: str, note: Mapping[str, JsonValue], words: str, budget: PageBudget) -> ShownNote:
    details = {name: value for name, value in note.items() if name != "kind" and value not in (None, [], "")}
    return ShownNote(
        group=group,
        kind=budget.fit_line(str(note.get("kind", "")), _HEADER_BYTES),
        words=words,
        details=budget.fit(outline_json(details, limit=_NOTE_BYTES) if details else ReadableText(text=""), _NOTE_BYTES),
    )
