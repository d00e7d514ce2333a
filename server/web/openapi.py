"""The OpenAPI document at `/schema`, generated from the routes.

There is no viewer, because its scripts would be loaded from another host.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final

from litestar import Litestar, MediaType, Request, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, License, SecurityScheme, Server, Tag
from litestar.types import Method
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from server.conversation.errors import RouteNotFound
from server.conversation.image import GIF, JPEG, PNG, WEBP
from server.web.auth import BEARER, KeyGuard
from server.web.body import Body
from server.web.sse import EVENT_STREAM, EVENTS

_METHODS: Final = frozenset({"get", "put", "post", "delete", "patch", "head"})
_INVENTED_STATUS: Final = "400"
_STREAMING: Final = {"take_turn": ("application/json", EVENT_STREAM), "follow_turn": (EVENT_STREAM,)}
"""Operations that stream, and the media types of their success."""
_BODY_OPTIONAL: Final = frozenset({"cancel_turn", "cancel_turn_as_operator"})
_IMAGE: Final = "show_image"
_OWN_MODELS: Final = "server.web."

_DESCRIPTION: Final = """\
A self-hosted, stateful conversation server. Send the new input; the server stores the conversation.

Every answer has an `x-request-id`. Errors are `application/problem+json` with a `code` that is never renamed; the \
documentation lists all codes.
"""


def _describe_events() -> str:
    """Describe the events of a stream in Markdown."""
    rows = "\n".join(f"| `{name}` | {data} |" for name, data in EVENTS.items())
    return (
        "A stream has these events, in this order, each with an integer `id`; exactly one of the last three ends it. "
        f"A comment is sent at least every 15 s.\n\n| event | data |\n|---|---|\n{rows}\n"
    )


def build_openapi(version: str) -> OpenAPIConfig:
    """Configure the document."""
    return OpenAPIConfig(
        title="Strata",
        version=version,
        summary="Conversations with Gemini and Claude, kept in Postgres",
        description=_DESCRIPTION,
        license=License(name="Apache-2.0", identifier="Apache-2.0"),
        servers=[Server(url="/")],
        tags=[
            Tag(name="assistants", description="Configured, versioned personas."),
            Tag(name="conversations", description="Conversations own turns, in a total order."),
            Tag(name="turns", description=f"Input and answers. {_describe_events()}"),
            Tag(name="keys", description="API keys."),
            Tag(name="usage", description="Tokens and costs of calls."),
            Tag(name="inspection", description="Views for operators."),
            Tag(name="actions", description="Actions of operators on conversations, recorded in the audit log."),
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
    """Document for each guarded route that it needs a key."""
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if any(isinstance(guard, KeyGuard) for guard in handler.guards or ()):
                handler.security = [{BEARER: []}]


class _Document(JsonRenderPlugin):
    """Renders the document once: the routes do not change while the server runs."""

    _rendered: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        if self._rendered is None:
            _correct(openapi_schema)
            self._rendered = self.render_json(request, openapi_schema)
        return self._rendered


def _correct(document: dict[str, Any]) -> None:
    """Correct what Litestar generates.

    Litestar documents a 400 with its own format on every route with a parameter, although these are answered with 422;
    it gives examples an `id`, which OpenAPI does not have; it supports one media type per status; it makes every body
    required and optional parameters nullable; and it omits some limits of pydantic's fields.
    """
    for item in document["paths"].values():
        for method in _METHODS & item.keys():
            _correct_operation(item[method])
    document["components"]["schemas"] |= _describe_models(document["components"]["schemas"])


def _correct_operation(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        parameter["schema"] = _without_null(parameter["schema"])
    answers: dict[str, Any] = operation["responses"]
    if MediaType.JSON.value in answers.get(_INVENTED_STATUS, {}).get("content", ()):
        del answers[_INVENTED_STATUS]
    for content in (body for answer in answers.values() for body in answer.get("content", {}).values()):
        for example in content.get("examples", {}).values():
            example.pop("id", None)
    if operation["operationId"] in _STREAMING:
        kinds = _STREAMING[operation["operationId"]]
        success = answers["200"]
        success["content"] = {
            kind: {"schema": {"type": "string", "description": _describe_events()}}
            if kind == EVENT_STREAM
            else success["content"][kind]
            for kind in kinds
        }
    if operation["operationId"] == _IMAGE:
        binary = {"schema": {"type": "string", "format": "binary"}}
        answers["200"]["content"] = dict.fromkeys((PNG, JPEG, GIF, WEBP), binary)
    if operation["operationId"] in _BODY_OPTIONAL:
        operation["requestBody"]["required"] = False


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from the schema of a parameter, which can be absent but not null."""
    kinds = [kind for kind in schema.get("oneOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {**kinds[0], **{name: value for name, value in schema.items() if name != "oneOf"}}


class _Schemas(GenerateJsonSchema):
    """pydantic's schemas without generated titles and without empty defaults."""

    def field_title_should_be_set(self, _schema: object) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if not described.get("default") and described.get("default") is not False:
            described.pop("default", None)
        return described


def _describe_models(names: Collection[str]) -> dict[str, Any]:
    """Return pydantic's schemas of the models that the document names, and of the models they refer to."""
    models = [model for model in _models_below(BaseModel) if model.__name__ in names]
    _, described = models_json_schema(
        [(model, "validation" if issubclass(model, Body) else "serialization") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    schemas: dict[str, Any] = described["$defs"]
    return schemas


def _models_below(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in root.__subclasses__():
        if model.__module__.startswith(_OWN_MODELS):
            yield model
        yield from _models_below(model)


def _name_operation(handler: HTTPRouteHandler, method: Method, _path: object) -> str:
    return handler.handler_name if method != "HEAD" else f"{handler.handler_name}_head"


async def _refuse_other_paths(request: Request[Any, Any, Any]) -> None:
    """Answer unknown paths below the document with a problem in place of Litestar's HTML page."""
    if request.path_params:
        raise RouteNotFound
