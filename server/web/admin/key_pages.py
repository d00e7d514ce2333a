"""Pages that list the keys of a tenant and revoke a key."""

from datetime import UTC, datetime

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, SkipValidation

from server.conversation.api_key import KeyRing
from server.conversation.audit import Actor
from server.inspection.admin_sessions import AdminSession
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.request import StrataRequest


@get("/keys")
async def show_keys(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    key_ring: NamedDependency[SkipValidation[KeyRing]],
    revoked: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Show all keys on one page, newest first: a tenant has few."""
    keys = await key_ring.list_keys(session.key.tenant_id)
    return answer_page(
        request,
        "keys.html",
        keys=list(reversed(keys)),
        now=datetime.now(UTC),
        revoked=next((key for key in keys if key.id == revoked and key.revoked_at is not None), None),
    )


@get("/keys/{key_id:str}/revoke")
async def confirm_revocation(
    request: StrataRequest,
    key_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    key_ring: NamedDependency[SkipValidation[KeyRing]],
) -> Response[bytes]:
    """Ask for confirmation."""
    key = await key_ring.load_key(tenant_id=session.key.tenant_id, key_id=key_id)
    return answer_page(request, "revoke_key.html", key=key, is_own=key.id == session.key.id)


@post("/keys/{key_id:str}/revoke", status_code=303)
async def revoke_key_on_page(
    key_id: FromPath[str],
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    key_ring: NamedDependency[SkipValidation[KeyRing]],
) -> Response[bytes]:
    """Revoke a key after checking that it belongs to the tenant of the session."""
    key = await key_ring.load_key(tenant_id=session.key.tenant_id, key_id=key_id)
    await key_ring.revoke_key(key.id, actor)
    return answer_redirect(f"/admin/keys?revoked={key.id}")
