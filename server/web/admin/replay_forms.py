"""The forms of replays, read as request bodies of the API."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from server.conversation.errors import ValidationFailed
from server.replay.rerun.replay import ReplayDraft, ReplayLimits
from server.web.api.replay_bodies import LimitsBody, ReplayBody, first_fault
from server.web.json_text import DuplicateKey, decode_json

FIELDS: Final = (
    "name",
    "conversation_ids",
    "assistant_id",
    "recorded_provider",
    "recorded_model",
    "tool_name",
    "text",
    "active_after",
    "active_before",
    "sample_count",
    "sample_seed",
    "provider",
    "model",
    "assistant_version",
    "settings",
    "candidate",
    "mode",
    "on_missing_result",
    "repetitions",
    "parallelism",
    "calls_per_minute",
    "budget_usd",
    "budget_tokens",
    "assertions",
    "judge_provider",
    "judge_model",
    "judge_prompt",
    "judge_settings",
)
_FILTERS: Final = {
    "assistant_id": "assistant_id",
    "recorded_provider": "provider",
    "recorded_model": "model",
    "tool_name": "tool_name",
    "text": "text",
}
_LIMITS: Final = ("repetitions", "parallelism", "calls_per_minute", "budget_tokens")
_JUDGE: Final = {"judge_provider": "provider", "judge_model": "model", "judge_prompt": "prompt"}
CHANGEABLE: Final = ("parallelism", "calls_per_minute", "budget_usd", "budget_tokens")
"""Limits that can be changed when a replay is continued."""


def read_fields(form: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that are filled in. Line ends of browsers (CR LF) become LF."""
    filled = {name: form.get(name, "").replace("\r\n", "\n").strip() for name in FIELDS}
    return {name: text for name, text in filled.items() if text}


def seal(fields: Mapping[str, str]) -> str:
    """Return a hash of the fields, so that only a replay that was estimated is started."""
    return hashlib.sha256(json.dumps(sorted(fields.items())).encode()).hexdigest()


def read_draft(fields: Mapping[str, str]) -> ReplayDraft:
    """Build the draft. Raises `ValidationFailed` with the field."""
    body: dict[str, Any] = {
        "name": fields.get("name", ""),
        "selection": _read_selection(fields),
        "candidate": _read_candidate(fields),
        "limits": {name: _read_number(name, fields[name]) for name in _LIMITS if name in fields},
        "assertions": [
            {"name": line[:200], "expression": line}
            for line in map(str.strip, fields.get("assertions", "").splitlines())
            if line
        ],
        "judge": _read_judge(fields),
    }
    body |= {name: fields[name] for name in ("mode", "on_missing_result") if name in fields}
    if "budget_usd" in fields:
        body["limits"]["budget_usd"] = _read_amount("budget_usd", fields["budget_usd"])
    try:
        return ReplayBody.model_validate(body).to_draft()
    except ValidationError as error:
        raise _refusal(*first_fault(error)) from error


def read_limits(form: Mapping[str, str], limits: ReplayLimits) -> ReplayLimits | None:
    """Return the limits with the changes of a form, or None if it has no field of a limit.

    An empty field removes a limit, and a missing one keeps it. Raises `ValidationFailed` with the field.
    """
    given = {name: form[name].strip() for name in CHANGEABLE if name in form}
    try:
        body = LimitsBody.model_validate({name: _read_limit(name, text) for name, text in given.items()})
    except ValidationError as error:
        raise _refusal(*first_fault(error)) from error
    return body.merge_into(limits) if given else None


def fill_limits(limits: ReplayLimits) -> dict[str, str]:
    """Return the fields of that form with the current limits."""
    usd = limits.budget_usd
    filled = {
        "parallelism": limits.parallelism,
        "calls_per_minute": limits.calls_per_minute,
        "budget_usd": None if usd is None else f"{usd.normalize():f}",
        "budget_tokens": limits.budget_tokens,
    }
    return {name: "" if value is None else str(value) for name, value in filled.items()}


def _read_selection(fields: Mapping[str, str]) -> dict[str, Any]:
    filters = {member: fields[name] for name, member in _FILTERS.items() if name in fields}
    for name in ("active_after", "active_before"):
        if name in fields:
            # A datetime field of a browser has no time zone. All times on the page are UTC.
            filters[name] = f"{fields[name]}Z"
    chosen: dict[str, Any] = {"filters": filters}
    if "conversation_ids" in fields:
        chosen["conversation_ids"] = fields["conversation_ids"].replace(",", " ").split()
    for name in ("sample_count", "sample_seed"):
        if name in fields:
            chosen[name] = _read_number(name, fields[name])
    return chosen


def _read_candidate(fields: Mapping[str, str]) -> dict[str, Any]:
    candidate = _read_object("candidate", fields.get("candidate", "{}"))
    candidate |= {name: fields[name] for name in ("provider", "model") if name in fields}
    if "assistant_version" in fields:
        candidate["assistant_version"] = _read_number("assistant_version", fields["assistant_version"])
    if "settings" in fields:
        candidate["settings"] = _read_object("settings", fields["settings"])
    return candidate


def _read_judge(fields: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the judge, or None if none of its fields is filled in."""
    judge: dict[str, Any] = {member: fields[name] for name, member in _JUDGE.items() if name in fields}
    if "judge_settings" in fields:
        judge["settings"] = _read_object("judge_settings", fields["judge_settings"])
    return judge or None


def _read_limit(name: str, text: str) -> float | None:
    if not text:
        return None
    return _read_amount(name, text) if name == "budget_usd" else _read_number(name, text)


def _read_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = decode_json(text.encode("utf-8", "surrogatepass"))
    except DuplicateKey as error:
        raise _refusal(name, f"This is ambiguous: {error}.") from None
    except (ValueError, RecursionError):
        raise _refusal(name, "This takes a JSON object.") from None
    if not isinstance(value, dict):
        raise _refusal(name, "This takes a JSON object.")
    return value


def _read_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _refusal(name, "This takes a whole number.") from None


def _read_amount(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refusal(name, "This takes an amount in dollars, such as 2.50.") from None


def _refusal(name: str, sentence: str) -> ValidationFailed:
    return ValidationFailed(f"{name}: {sentence}", errors=[{"path": name, "source": "body", "message": sentence}])
