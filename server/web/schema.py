"""The OpenAPI document: what `/schema` answers, made from the routes themselves.

The document and nothing else: no viewer, whose scripts would come from another host.
"""

from typing import Any, Final

from litestar import Litestar, MediaType, Request, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, License, SecurityScheme, Server, Tag
from litestar.types import Method

from server.errors import RouteNotFound
from server.web.auth import BEARER, KeyGuard

_METHODS: Final = frozenset({"get", "put", "post", "delete", "patch", "head"})
_INVENTED_STATUS: Final = "400"

_DESCRIPTION: Final = """\
A self-hosted, stateful conversation server. Send what is new; the server keeps the rest.

Every answer has an `x-request-id`. Errors are `application/problem+json` with a `code` that is never renamed; the \
documentation lists all codes.
"""


def build_openapi(version: str) -> OpenAPIConfig:
    """How Litestar makes the document."""
    return OpenAPIConfig(
        title="Strata",
        version=version,
        summary="Conversations with Gemini and Claude, kept in Postgres",
        description=_DESCRIPTION,
        license=License(name="Apache-2.0", identifier="Apache-2.0"),
        servers=[Server(url="/")],
        tags=[
            Tag(name="keys", description="API keys: who may come in."),
            Tag(name="operations", description="For orchestrators and dashboards; no key needed."),
        ],
        components=Components(
            security_schemes={
                BEARER: SecurityScheme(
                    type="http", scheme="bearer", bearer_format="strata_<id>_<secret>", description="An API key."
                )
            }
        ),
        operation_id_creator=_name_operation,
        render_plugins=[_Document(path=["/", "/openapi.json"], media_type=MediaType.JSON)],
        openapi_router=Router(
            "/schema", route_handlers=[], include_in_schema=False, before_request=_refuse_other_paths
        ),
    )


def note_security(app: Litestar) -> None:
    """Writes into the document of each guarded route that it needs a key: said once, by the guard."""
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if any(isinstance(guard, KeyGuard) for guard in handler.guards or ()):
                handler.security = [{BEARER: []}]


class _Document(JsonRenderPlugin):
    """Renders once: the routes do not change while the server runs."""

    _rendered: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        if self._rendered is None:
            _correct(openapi_schema)
            self._rendered = self.render_json(request, openapi_schema)
        return self._rendered


def _correct(document: dict[str, Any]) -> None:
    """Puts right what Litestar writes and OpenAPI does not know, or what does not hold here.

    It documents a 400 of its own shape on every route with a parameter, where ours are 422 and documented, and it gives
    examples an `id`, which the specification does not have.
    """
    for item in document["paths"].values():
        for method in _METHODS & item.keys():
            answers: dict[str, Any] = item[method]["responses"]
            if MediaType.JSON.value in answers.get(_INVENTED_STATUS, {}).get("content", ()):
                del answers[_INVENTED_STATUS]
            for content in (body for answer in answers.values() for body in answer.get("content", {}).values()):
                for example in content.get("examples", {}).values():
                    example.pop("id", None)


def _name_operation(handler: HTTPRouteHandler, method: Method, _path: object) -> str:
    return handler.handler_name if method != "HEAD" else f"{handler.handler_name}_head"


async def _refuse_other_paths(request: Request[Any, Any, Any]) -> None:
    """Litestar answers unknown paths below the document with an HTML page; ours are problems."""
    if request.path_params:
        raise RouteNotFound
