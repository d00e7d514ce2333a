"""Static files of the pages: styles, scripts, an icon. They are read once, when the program starts.

The URL of a file contains the hash of its content, so browsers can cache it without a time limit.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from litestar import Response, get
from litestar.params import FromPath

from server.conversation.errors import RouteNotFound

_FOLDER: Final = Path(__file__).parent / "static"
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other kinds are not served."""
_HASH_LETTERS: Final = 16
_IMMUTABLE: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file as it is served."""

    name: str
    url: str
    data: bytes
    media_type: str


def load_assets(folder: Path = _FOLDER) -> dict[str, Asset]:
    """Read the files of a folder that can be served, by name."""
    return {path.name: _load(path) for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}


def _load(path: Path) -> Asset:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:_HASH_LETTERS]
    return Asset(
        name=path.name,
        url=f"/admin/static/{digest}/{path.name}",
        data=data,
        media_type=_MEDIA_TYPES[path.suffix],
    )


ASSETS: Final = load_assets()


@get("/static/{digest:str}/{name:str}")
async def show_asset(digest: FromPath[str], name: FromPath[str]) -> Response[bytes]:
    """Answer with a file if the hash is the current one. Needs no session: the login page uses the files too."""
    asset = ASSETS.get(name)
    if asset is None or asset.url != f"/admin/static/{digest}/{name}":
        raise RouteNotFound
    return Response(content=asset.data, headers={"content-type": asset.media_type, "cache-control": _IMMUTABLE})
