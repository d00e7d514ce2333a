"""The route that returns images of a conversation."""

import re
from collections.abc import Mapping
from typing import Any, Final

from litestar import MediaType, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.api_key import ApiKey
from server.conversation.block import Blob
from server.conversation.errors import ConversationNotFound, ImageNotFound
from server.conversation.store import Store
from server.web.auth import client_only
from server.web.errors import document_client_errors

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_IMMUTABLE: Final = "private, max-age=31536000, immutable"


@get(
    "/v1/conversations/{conversation_id:str}/images/{sha256:str}",
    guards=[client_only],
    media_type=MediaType.TEXT,
    summary="Load an image of a conversation",
    response_description="The bytes, with their detected type.",
    description="Returns the image as the client sent it, by the `sha256` of its block. It never changes.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, ImageNotFound),
)
async def show_image(
    conversation_id: FromPath[str],
    sha256: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    return answer_image(await load_image(store, caller.tenant_id, conversation_id, sha256))


async def load_image(store: Store, tenant_id: str, conversation_id: str, sha256: str) -> Blob:
    """Load an image of a turn of the conversation. Raises `ConversationNotFound`, `ImageNotFound`."""
    await store.load_conversation(tenant_id, conversation_id)
    if _SHA256.fullmatch(sha256) is None:
        raise ImageNotFound
    blob = await store.load_blob(tenant_id, bytes.fromhex(sha256), conversation_id=conversation_id)
    if blob is None:
        raise ImageNotFound
    return blob


def answer_image(blob: Blob, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    """Answer with an image, to be cached by the browser and by no shared cache."""
    shared = {"cache-control": _IMMUTABLE, "etag": f'"{blob.sha256.hex()}"', "content-disposition": "inline"}
    answer: Response[Any] = Response(
        content=blob.data, media_type=blob.media_type, headers={**shared, **(headers or {})}
    )
    return answer
