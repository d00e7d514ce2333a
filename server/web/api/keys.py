"""Routes to load, list and revoke API keys. Keys are created with `strata keys create`."""

from datetime import datetime
from typing import Self

from litestar import Response, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey, KeyRing, Scope
from server.conversation.audit import Actor
from server.conversation.errors import ApiKeyNotFound, DatabaseUnavailable, KeyRejected, RateLimited, ScopeMissing
from server.web.api.views import View
from server.web.auth import admin_only, any_live_key
from server.web.errors import document_errors
from server.web.json_text import answer_json

_KEY_ID = "key_01jd0z8s3bf6h9kq2m4n6p8r0t"


class TenantView(View):
    """The tenant of a key."""

    id: str = Field(examples=["tenant_01jd0z8s3bf6h9kq2m4n6p8r0t"])
    name: str = Field(examples=["acme"])


class KeyView(View):
    """An API key without its secret, which is shown once, when the key is created."""

    id: str = Field(examples=[_KEY_ID])
    name: str = Field(description="The name that the operator chose.", examples=["billing service"])
    tenant: TenantView
    scopes: list[Scope] = Field(description="The scopes of the key.", examples=[["client"]])
    created_at: datetime = Field(examples=["2026-01-31T09:30:00Z"])
    expires_at: datetime | None = Field(description="Null: never.", examples=["2027-01-31T00:00:00Z"])
    revoked_at: datetime | None = Field(description="Null: not revoked.", examples=[None])
    last_used_at: datetime | None = Field(
        description="Accurate to about a minute. Null: never used.", examples=["2026-03-01T12:00:00Z"]
    )

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        return cls(
            id=key.id,
            name=key.name,
            tenant=TenantView(id=key.tenant_id, name=key.tenant_name),
            scopes=sorted(key.scopes),
            created_at=key.created_at,
            expires_at=key.expires_at,
            revoked_at=key.revoked_at,
            last_used_at=key.last_used_at,
        )


class KeyPage(View):
    """Keys, oldest first."""

    data: list[KeyView]
    next_cursor: str | None = Field(default=None, description="Null: there are no more.", examples=[None])


@get(
    "/v1/key",
    guards=[any_live_key],
    summary="Load the key of this request",
    response_description="The key.",
    description="Returns the tenant and the scopes of the key. Any valid key is accepted.",
    tags=["keys"],
    responses=document_errors(KeyRejected, RateLimited, DatabaseUnavailable),
)
async def show_own_key(caller: NamedDependency[SkipValidation[ApiKey]]) -> Response[KeyView]:
    return answer_json(KeyView.of(caller))


@get(
    "/admin/api/keys",
    guards=[admin_only],
    summary="List the keys of the tenant",
    response_description="The keys.",
    description="Oldest first, including revoked and expired keys.",
    tags=["keys"],
    responses=document_errors(KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def list_keys(
    caller: NamedDependency[SkipValidation[ApiKey]], key_ring: NamedDependency[SkipValidation[KeyRing]]
) -> Response[KeyPage]:
    """Return all keys on one page: a tenant has few."""
    keys = await key_ring.list_keys(caller.tenant_id)
    return answer_json(KeyPage(data=[KeyView.of(key) for key in keys]))


@get(
    "/admin/api/keys/{key_id:str}",
    guards=[admin_only],
    summary="Load a key of the tenant",
    response_description="The key.",
    description="A key of another tenant is not found.",
    tags=["keys"],
    responses=document_errors(KeyRejected, ScopeMissing, ApiKeyNotFound, DatabaseUnavailable),
)
async def show_key(
    key_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    key_ring: NamedDependency[SkipValidation[KeyRing]],
) -> Response[KeyView]:
    return answer_json(KeyView.of(await key_ring.load_key(tenant_id=caller.tenant_id, key_id=key_id)))


@delete(
    "/admin/api/keys/{key_id:str}",
    guards=[admin_only],
    status_code=200,
    summary="Revoke a key of the tenant",
    response_description="The revoked key.",
    description="The key is refused as soon as this is answered. Revoking it again changes nothing. A key may revoke "
    "itself.",
    tags=["keys"],
    responses=document_errors(KeyRejected, ScopeMissing, ApiKeyNotFound, DatabaseUnavailable),
)
async def revoke_key(
    key_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    key_ring: NamedDependency[SkipValidation[KeyRing]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[KeyView]:
    """Revoke a key after checking that it belongs to the tenant of the caller."""
    key = await key_ring.load_key(tenant_id=caller.tenant_id, key_id=key_id)
    return answer_json(KeyView.of(await key_ring.revoke_key(key.id, actor)))
