"""The candidate of a replay as an assistant definition."""

from collections.abc import Mapping
from dataclasses import replace

from server.conversation.assistant import AssistantDefinition
from server.conversation.block import JsonValue
from server.conversation.errors import ValidationFailed
from server.payload.settings import check_settings
from server.providers.choice import KEY_VARIABLES
from server.providers.model_name import names_in_tables
from server.providers.model_profile import PROFILES
from server.replay.rerun.replay import Candidate
from server.replay.rerun.validation import refuse


def build_definition(recorded: AssistantDefinition, candidate: Candidate) -> AssistantDefinition:
    """Merge the candidate into the recorded definition.

    Raises `ValidationFailed` with the field if the model does not accept the result.
    """
    provider = candidate.provider or recorded.provider
    if provider not in KEY_VARIABLES:
        refuse([("candidate.provider", f"There is no provider called {provider}.")])
    if provider != recorded.provider and candidate.model is None:
        refuse(
            [
                (
                    "candidate.model",
                    f"Another provider needs a model: {recorded.model} is a model of {recorded.provider}.",
                )
            ]
        )
    model = candidate.model or recorded.model
    listed = next((PROFILES[name] for name in names_in_tables(model) if name in PROFILES), None)
    if listed is not None and listed.provider != provider:
        refuse([("candidate.model", f"{model} is not a model of {provider}.")])
    definition = replace(
        recorded,
        provider=provider,
        model=model,
        settings=_merge_settings(recorded.settings, candidate),
        instructions=candidate.instructions or recorded.instructions,
        variables=recorded.variables if candidate.variables is None else candidate.variables,
        tools=recorded.tools if candidate.tools is None else candidate.tools,
    )
    _check(definition)
    return definition


def keeps_static(candidate: Candidate, provider: str) -> bool:
    """Return whether the recorded static text is used. `provider`: the recorded one."""
    texts = (candidate.assistant_id, candidate.assistant_version, candidate.instructions, candidate.variables)
    is_same = candidate.provider in (None, provider) and all(text is None for text in texts)
    return is_same and f"{provider}_static_prompt.j2" not in candidate.templates


def keeps_dynamic(candidate: Candidate, provider: str) -> bool:
    """Return whether the recorded dynamic layer is used. `provider`: the candidate's.

    It is also used if the recorded provider was another one, because it describes the state at that time.
    """
    return f"{provider}_dynamic_prompt.j2" not in candidate.templates


def _merge_settings(recorded: Mapping[str, JsonValue], candidate: Candidate) -> dict[str, JsonValue]:
    settings = {**recorded, **(candidate.settings or {})}
    if candidate.layer_order is not None:
        settings["layer_order"] = str(candidate.layer_order)
    if candidate.compaction is not None:
        settings["compaction"] = dict(candidate.compaction)
    return {name: value for name, value in settings.items() if value is not None}


def _check(definition: AssistantDefinition) -> None:
    try:
        check_settings(definition.provider, definition.model, definition.settings)
    except ValidationFailed as error:
        found = error.details.get("errors")
        errors = [{**fault, "path": f"candidate.{fault['path']}"} for fault in found] if isinstance(found, list) else []
        raise ValidationFailed(
            f"candidate.{error.message}",
            hint="A null setting is removed, so that the model's default applies.",
            errors=errors,
        ) from error
