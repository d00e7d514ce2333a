"""An operator that uses the pages over HTTP, without a browser."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from server.conversation.api_key import ApiKey, Scope
from server.postgres.engine import Database
from tests.conftest import StrataServer

PAGES = (
    "/admin", "/admin/conversations", "/admin/assistants", "/admin/replays",
    "/admin/keys", "/admin/audit", "/admin/views",
)  # fmt: skip


class Operator:
    """An HTTP client that keeps cookies and sends the origin of its forms."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.client.get(path, headers=headers)

    async def send(self, path: str, data: dict[str, str], **headers: str) -> httpx2.Response:
        origin = {"origin": str(self.client.base_url).rstrip("/")}
        return await self.client.post(path, data=data, headers={**origin, **headers})

    async def log_in(self, key: str, **headers: str) -> httpx2.Response:
        return await self.send("/admin/login", {"key": key}, **headers)

    async def csrf_token(self) -> str:
        found = re.search(r'name="csrf-token" content="(\w+)"', (await self.get("/admin/keys")).text)
        assert found is not None
        return found[1]


@asynccontextmanager
async def open_operator(url: str) -> AsyncIterator[Operator]:
    async with httpx2.AsyncClient(base_url=url, headers={"accept": "text/html"}) as client:
        yield Operator(client)


async def admin_key_of(server: StrataServer) -> ApiKey:
    return next(key for key in await server.key_ring.list_keys(server.tenant.id) if Scope.ADMIN in key.scopes)


async def audited(database: Database) -> list[tuple[str, str, str | None]]:
    async with database.connection() as connection:
        # The creation of the keys of the test is not part of what it asserts.
        rows = await connection.fetch(
            "SELECT action, outcome, object FROM audit_log WHERE action <> 'key.create' ORDER BY id"
        )
    return [(row["action"], row["outcome"], row["object"]) for row in rows]
