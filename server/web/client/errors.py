"""What can go wrong for a client.

    ClientError
    ├── ServerUnreachable      no connection, or it broke and could not be taken up again
    ├── AnswerMalformed        what came is not what a Strata server says
    ├── ToolRoundsExceeded     the model asks for tools without end
    └── StrataProblem          the server says no, with a code, a sentence and a hint
        └── TurnFailed         the turn was taken and failed; what had arrived is kept

They stand apart from `server.conversation.errors`: those are what a server says about itself, these what a client sees.
A problem has the server's `code`, so the two meet there.
"""

from collections.abc import Mapping
from typing import Any

from server.web.client.answers import TurnEnded


class ClientError(Exception):
    """Something went wrong between a client and its server."""

    def __init__(self, detail: str, *, hint: str = "") -> None:
        self.detail = detail
        self.hint = hint
        super().__init__(detail)

    def __str__(self) -> str:
        return f"{self.detail} {self.hint}".strip()


class ServerUnreachable(ClientError):
    """There is no connection to the server. `sent`: the request may have reached it all the same."""

    def __init__(self, detail: str, *, hint: str = "", sent: bool) -> None:
        self.sent = sent
        super().__init__(detail, hint=hint)


class AnswerMalformed(ClientError):
    """What came is not what a Strata server says."""


class ToolRoundsExceeded(ClientError):
    """The model asked for tools again and again. The conversation waits for the results of its last calls."""


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
        """`status` is None where it came inside a stream. `members` are those that only some codes have."""
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds
        """How long to wait before the same request may succeed; None where waiting does not help."""
        self.members: Mapping[str, Any] = members or {}
        super().__init__(detail, hint=hint)


class TurnFailed(StrataProblem):
    """The turn was taken and did not end well. `ended` has what had arrived; the conversation goes on from there."""

    def __init__(self, ended: TurnEnded) -> None:
        self.ended = ended
        error = ended.turn.error
        super().__init__(
            error.message if error else "The turn failed.",
            code=error.code if error else "turn_failed",
            status=None,
            hint=error.hint if error else "",
        )
