"""The bytes of images that clients sent."""

import re
from typing import Any, Final

from litestar import MediaType, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.api_key import ApiKey
from server.errors import ConversationNotFound, ImageNotFound
from server.store import Store
from server.web.auth import client_only
from server.web.errors import document_client_errors

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_IMMUTABLE: Final = "private, max-age=31536000, immutable"


@get(
    "/v1/conversations/{conversation_id:str}/images/{sha256:str}",
    guards=[client_only],
    media_type=MediaType.TEXT,
    summary="An image of a conversation",
    response_description="The bytes, with the type that they really are.",
    description="As the client sent it, by the `sha256` of its block. It never changes.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, ImageNotFound),
)
async def show_image(
    conversation_id: FromPath[str],
    sha256: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    """The bytes. The edge adds what keeps a browser from taking them for a page."""
    await store.load_conversation(caller.tenant_id, conversation_id)
    if _SHA256.fullmatch(sha256) is None:
        raise ImageNotFound
    blob = await store.load_blob(caller.tenant_id, bytes.fromhex(sha256), conversation_id=conversation_id)
    if blob is None:
        raise ImageNotFound
    headers = {"cache-control": _IMMUTABLE, "etag": f'"{sha256}"', "content-disposition": "inline"}
    answer: Response[Any] = Response(content=blob.data, media_type=blob.media_type, headers=headers)
    return answer
