"""Errors of the client.

    ClientError
    ├── ServerUnreachable      no connection, or it broke and could not be restored
    ├── AnswerMalformed        the answer is not one of a Strata server
    ├── ToolRoundsExceeded     the model called tools in too many turns in a row
    └── StrataProblem          the server refused the request, with a code, a message and a hint
        └── TurnFailed         the turn was accepted and failed; the part that arrived is kept

They are separate from `server.conversation.errors`, which are the errors of a server. A `StrataProblem` has the `code`
of one of those.
"""

from collections.abc import Mapping
from typing import Any

from server.web.client.answers import TurnEnded


class ClientError(Exception):
    """Base class of the client's errors."""

    def __init__(self, detail: str, *, hint: str = "") -> None:
        self.detail = detail
        self.hint = hint
        super().__init__(detail)

    def __str__(self) -> str:
        return f"{self.detail} {self.hint}".strip()


class ServerUnreachable(ClientError):
    """There is no connection to the server. `sent`: the request may have reached it nevertheless."""

    def __init__(self, detail: str, *, hint: str = "", sent: bool) -> None:
        self.sent = sent
        super().__init__(detail, hint=hint)


class AnswerMalformed(ClientError):
    """The answer is not one of a Strata server."""


class ToolRoundsExceeded(ClientError):
    """The model called tools in too many turns in a row. The conversation waits for the results of its last calls."""


class StrataProblem(ClientError):
    """The server answered with a problem."""

    def __init__(
        self,
        detail: str,
        *,
        code: str,
        status: int | None,
        hint: str = "",
        request_id: str = "",
        retry_after_seconds: float | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        """`status` is None if the error came inside a stream. `members` are those that only some codes have."""
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds
        """How long to wait before the same request may succeed; None if waiting does not help."""
        self.members: Mapping[str, Any] = members or {}
        super().__init__(detail, hint=hint)


class TurnFailed(StrataProblem):
    """The turn was accepted and failed or was interrupted. `ended` has the part of the answer that arrived."""

    def __init__(self, ended: TurnEnded) -> None:
        self.ended = ended
        error = ended.turn.error
        super().__init__(
            error.message if error else "The turn failed.",
            code=error.code if error else "turn_failed",
            status=None,
            hint=error.hint if error else "",
        )
