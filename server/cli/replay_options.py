"""The options of `strata replay run`, as a request body of the HTTP API."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
from pydantic import ValidationError

from server.web.api.replay_bodies import LimitsBody, ReplayBody, first_fault

_FILTERS: Final = {
    "assistant": "assistant_id",
    "recorded_provider": "provider",
    "recorded_model": "model",
    "error_code": "error_code",
    "tool": "tool_name",
    "text": "text",
    "active_after": "active_after",
    "active_before": "active_before",
}
_CANDIDATE: Final = {
    "provider": "provider",
    "model": "model",
    "candidate_assistant": "assistant_id",
    "assistant_version": "assistant_version",
    "layer_order": "layer_order",
}
_LIMITS: Final = ("repetitions", "parallelism", "calls_per_minute", "budget_usd", "budget_tokens")


def read_body(options: dict[str, Any]) -> ReplayBody:
    """Build the body from the file of the draft and the options, which override it. Raises `click.UsageError`."""
    read = _read_json(options["draft_file"]) if options["draft_file"] else {}
    if not isinstance(read, dict):
        raise click.UsageError(f"{options['draft_file']} does not contain a JSON object.")
    body: dict[str, Any] = {"name": "From the command line", **read}
    _copy_options(body, options, {"name": "name", "mode": "mode", "on_missing": "on_missing_result"})
    _fill_selection(_part(body, "selection"), options)
    candidate = _part(body, "candidate")
    _copy_options(candidate, options, _CANDIDATE)
    _fill_candidate(candidate, options)
    _copy_options(_part(body, "limits"), options, {name: name for name in _LIMITS})
    assertions = body.get("assertions") or []
    if not isinstance(assertions, list):
        raise click.UsageError("assertions must be a JSON array.")
    body["assertions"] = [*assertions, *_read_assertions(options)]
    if options["dry_run"]:
        body["dry_run"] = True
    try:
        return ReplayBody.model_validate(body)
    except ValidationError as error:
        raise click.UsageError(": ".join(first_fault(error))) from error


def read_limits(changes: dict[str, Any]) -> LimitsBody:
    """Build the limits from options. Raises `click.UsageError`."""
    try:
        return LimitsBody.model_validate({name: value for name, value in changes.items() if value is not None})
    except ValidationError as error:
        raise click.UsageError(": ".join(first_fault(error))) from error


def _fill_selection(selection: dict[str, Any], options: dict[str, Any]) -> None:
    if options["conversations"]:
        selection["conversation_ids"] = list(options["conversations"])
    _copy_options(selection, options, {"sample": "sample_count", "seed": "sample_seed"})
    _copy_options(_part(selection, "filters"), options, _FILTERS)


def _fill_candidate(candidate: dict[str, Any], options: dict[str, Any]) -> None:
    for pair in options["settings"]:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--setting takes NAME=VALUE, such as thinking=low, not {pair!r}.")
        _part(candidate, "settings")[name] = _read_value(text)
    for file in options["templates"]:
        _part(candidate, "templates")[file.name] = _read_text(file)


def _read_assertions(options: dict[str, Any]) -> list[dict[str, Any]]:
    expressions = [{"name": text[:200], "expression": text} for text in options["assertions"]]
    schemas = [{"name": file.name, "schema": _read_json(file)} for file in options["assertion_schemas"]]
    return expressions + schemas


def _copy_options(target: dict[str, Any], options: dict[str, Any], names: dict[str, str]) -> None:
    for option, member in names.items():
        value = options[option]
        if value is not None:
            target[member] = value.isoformat() if isinstance(value, datetime) else value


def _part(body: dict[str, Any], name: str) -> dict[str, Any]:
    part = {} if body.get(name) is None else body[name]
    body[name] = part
    if not isinstance(part, dict):
        raise click.UsageError(f"{name} must be a JSON object.")
    return part


def _read_value(text: str) -> Any:
    """Parse JSON. A text that is not JSON is used as it is, so that `low` needs no quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{file} cannot be read.") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(_read_text(file))
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    except RecursionError:
        raise click.UsageError(f"{file} is nested too deeply.") from None
