"""Whose conversation a page is about."""

from server.conversation.errors import ConversationNotFound
from server.inspection.admin_sessions import AdminSession
from server.inspection.port import Inspector


async def load_owner(inspector: Inspector, session: AdminSession, conversation_id: str) -> str:
    """The tenant that has the conversation. Raises `ConversationNotFound`, also where the session must not see it."""
    owner = await inspector.find_tenant(conversation_id)
    if owner is None or session.tenant_scope not in {None, owner}:
        raise ConversationNotFound
    return owner
