"""The bodies with which conversations are made and changed."""

from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from server.web.api.views import ASSISTANT_ID
from server.web.body import LARGEST_BIGINT, LARGEST_INTEGER, Body, ContextObject, JsonObject, TextLimit

_LABEL: Final = TextLimit(256)


class ConversationBody(Body):
    """What is chosen when a conversation is made."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"assistant_id": ASSISTANT_ID},
                {
                    "assistant_id": ASSISTANT_ID,
                    "identifier": "ticket-4711",
                    "source": "web",
                    "args": {"city": "Oslo"},
                    "context": {"todos": ["pack"]},
                    "metadata": {"client.language": "nb"},
                },
            ]
        }
    )

    assistant_id: str
    assistant_version: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="Else the newest there is now."
    )
    identifier: Annotated[str, _LABEL] | None = Field(default=None, description="Your own name for it.")
    source: Annotated[str, _LABEL] | None = Field(default=None, description="Prompt argument `conversation.source`.")
    direction: Annotated[str, _LABEL] | None = Field(
        default=None, description="Prompt argument `conversation.direction`."
    )
    mode: Annotated[str, _LABEL] | None = Field(default=None, description="Prompt argument `session.mode`.")
    args: JsonObject = Field(default_factory=dict, description="Prompt arguments.")
    context: ContextObject = Field(
        default_factory=dict, description="The dynamic layer: `file_references`, `artifacts`, `todos`, and your own."
    )
    metadata: JsonObject = Field(
        default_factory=dict, description="Yours; never sent to a model. `client.language` is the user's language."
    )


class ConversationEdit(Body):
    """What is to change. What is absent stays."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "examples": [{"assistant_version": "latest"}, {"metadata": {"team": "north"}, "expected_revision": 4}],
        }
    )

    assistant_version: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | Literal["latest"] = Field(
        default=0, description="Moves the conversation to another version of its assistant."
    )
    args: JsonObject = Field(default_factory=dict)
    context: ContextObject = Field(default_factory=dict)
    metadata: JsonObject = Field(default_factory=dict)
    expected_revision: int | None = Field(default=None, ge=0, le=LARGEST_BIGINT)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set - {"expected_revision"}:
            message = "Expected something to change"
            raise ValueError(message)
        return self


class ForkBody(Body):
    """Where the new conversation parts from the old one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"at_seq": 4}]})

    at_seq: int = Field(ge=1, le=LARGEST_BIGINT, description="The last turn that both share.")
