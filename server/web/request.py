"""The request class of all handlers, and the keys of the state that travels with a request."""

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
"""Key of the scope's state: the id of the request, set by the middleware."""
PROBLEM_CODE: Final = "problem_code"
"""Key of the scope's state: the code of the problem that was answered, logged by the middleware."""
FAILURE: Final = "failure"
"""Key of the scope's state: the unexpected exception of an `internal` problem, logged by the middleware."""
SESSION: Final = "admin_session"
"""Key of the scope's state: the session of a page, set by the guard of the pages."""
PARTS: Final = "parts"
"""Key of the scope's state: the dependencies of handlers by name, set by the middleware. They are not in the Litestar
application, which all programs of a process share."""


def request_id_of(scope: Mapping[str, Any]) -> str:
    request_id: str = scope["state"][REQUEST_ID]
    return request_id


def part_of(scope: Mapping[str, Any], name: str) -> Any:
    """Return a dependency of the program that serves this request."""
    return scope["state"][PARTS][name]


class StrataRequest(Request[ApiKey | None, Any, State]):
    """A request that reads JSON bodies strictly."""

    __slots__ = ()

    @property
    def decoded_body(self) -> object:
        """The JSON of the body if it has been decoded, else None. Paths of fields are checked against it."""
        body = self._connection_state.json
        return None if body is Empty else body

    def forget_body(self) -> None:
        """Free the memory of the body and its JSON, for handlers whose answer takes minutes."""
        self._body = self._json = self._connection_state.body = self._connection_state.json = Empty

    async def json(self) -> Any:
        """Decode the body, as JSON if it has no content type. Raises `MediaTypeUnsupported`, `BodyMalformed`."""
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
        """Decode a body that the fast decoder refused, which also happens for unpaired surrogates."""
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
