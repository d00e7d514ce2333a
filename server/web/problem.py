"""The body of every error answer: RFC 9457 problem details, with a machine-readable code."""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

_EXAMPLE_REQUEST_ID: Final = "req_5f0c1d9e8b7a46352413f2e1d0c9b8a7"


class FieldFault(BaseModel):
    """An error in one field of the request."""

    model_config = ConfigDict(frozen=True)

    path: str = Field(description="Path of the field: names and indexes joined by dots.", examples=["input.0.text"])
    source: str = Field(description="`body`, `query`, `path`, `header` or `cookie`.", examples=["body"])
    message: str = Field(
        description="What is wrong. The value is not repeated.",
        examples=["String should have at most 3 characters"],
    )


class Problem(BaseModel):
    """An error. Some codes add members, for instance `scope` or `rule`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="URN of the error code.", examples=["urn:strata:error:validation_failed"])
    title: str = Field(description="The name of the HTTP status.", examples=["Unprocessable Entity"])
    status: int = Field(description="The HTTP status.", examples=[422])
    code: str = Field(
        description="The error code, for programs. Codes are never renamed.", examples=["validation_failed"]
    )
    detail: str = Field(
        description="The error message, for people.",
        examples=["A field of the request has a value that is not allowed."],
    )
    hint: str | None = Field(
        default=None,
        description="What to do about it.",
        examples=["Correct the fields listed in `errors` and send the request again."],
    )
    request_id: str = Field(
        description="The same as in the `x-request-id` header and in the server's log.",
        examples=[_EXAMPLE_REQUEST_ID],
    )
    errors: list[FieldFault] | None = Field(
        default=None, description="The faulty fields; for `validation_failed` only."
    )
