"""The request as our handlers see it, and what travels with it from the edge inwards."""

from collections.abc import Mapping
from typing import Any, Final

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import SerializationException
from litestar.types import Empty

from server.conversation.api_key import ApiKey
from server.conversation.errors import BodyMalformed, MediaTypeUnsupported
from server.web.json_text import DuplicateKey, decode_json, refuse_duplicate_keys

REQUEST_ID: Final = "request_id"
PROBLEM_CODE: Final = "problem_code"
FAILURE: Final = "failure"
"""Keys of the scope's state: the request's id, set by the edge; the code of the problem that was answered and the
unknown exception behind it, set by `errors` and read by the edge, which alone writes to the log."""
SESSION: Final = "admin_session"
"""Another: the session of a page, set by the guard of the pages."""
PARTS: Final = "parts"
"""Another: what this program is made of, by the names of parameters, set by the edge. The framework's part of an
application knows of no program, so all programs of a process share it."""


def request_id_of(scope: Mapping[str, Any]) -> str:
    """The id that the edge gave to this request."""
    request_id: str = scope["state"][REQUEST_ID]
    return request_id


def part_of(scope: Mapping[str, Any], name: str) -> Any:
    """A part of the program that serves this request."""
    return scope["state"][PARTS][name]


class StrataRequest(Request[ApiKey | None, Any, State]):
    """Reads JSON bodies strictly: a wrong content type and broken text have errors of their own."""

    __slots__ = ()

    @property
    def decoded_body(self) -> object:
        """The JSON of the body if it was decoded already, else None. Field paths are checked against it."""
        body = self._connection_state.json
        return None if body is Empty else body

    def forget_body(self) -> None:
        """Lets go of the body and its JSON. For handlers whose answer takes minutes, after they have read it."""
        self._body = self._json = self._connection_state.body = self._connection_state.json = Empty

    async def json(self) -> Any:
        """Raises `MediaTypeUnsupported` and `BodyMalformed`. A body without a content type is taken for JSON."""
        media_type = self.content_type[0].lower()
        if media_type and media_type != "application/json" and not media_type.endswith("+json"):
            raise MediaTypeUnsupported
        if self._connection_state.json is not Empty:
            return self._connection_state.json
        try:
            decoded = await super().json()
            refuse_duplicate_keys(await self.body(), decoded)
        except (SerializationException, UnicodeDecodeError):
            return await self._read_slowly()
        except DuplicateKey as error:
            raise _duplicate(error) from None
        except RecursionError:
            raise _too_deep() from None
        return decoded

    async def _read_slowly(self) -> Any:
        """The quick decoder refuses halves of surrogate pairs; before anything is called malformed, ours has a look."""
        try:
            decoded = decode_json(await self.body())
        except DuplicateKey as error:
            raise _duplicate(error) from None
        except ValueError:
            raise BodyMalformed from None
        except RecursionError:
            raise _too_deep() from None
        self._json = self._connection_state.json = decoded
        return decoded


def _too_deep() -> BodyMalformed:
    return BodyMalformed("The request body is nested too deeply.", hint="Send a flatter document.")


def _duplicate(error: DuplicateKey) -> BodyMalformed:
    return BodyMalformed(f"The request body is refused: {error}.", hint="Send each key once.", key=error.key)
