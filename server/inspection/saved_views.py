"""Saved views: named filters of the list of conversations.

A view stores the filters as query parameters, so relative times such as "the last seven days" stay relative. Views
belong to a tenant and are visible to all operators of the tenant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from server.conversation.audit import Actor
from server.conversation.errors import ValidationFailed

VIEW_LIMIT: Final = 50
"""Maximum number of views of a tenant."""
NAME_LIMIT: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """A named set of filters."""

    id: str
    name: str
    filters: Mapping[str, str]
    """Query parameters; never empty."""
    key_id: str | None
    """The key that saved it."""
    created_at: datetime


def clean_name(name: str) -> str:
    """Strip and collapse the spaces of a name. Raises `ValidationFailed`."""
    cleaned = " ".join(name.split())
    if not 0 < len(cleaned) <= NAME_LIMIT:
        sentence = f"Use 1 to {NAME_LIMIT} characters."
        fault = {"path": "name", "source": "body", "message": sentence}
        raise ValidationFailed(f"The name cannot be used. {sentence}", hint="Go back and correct it.", errors=[fault])
    return cleaned


class SavedViews(Protocol):
    """Stores views. Changes are audited in the same transaction. Every method may raise `DatabaseUnavailable`."""

    async def list_views(self, tenant_id: str) -> Sequence[SavedView]:
        """List all views by name."""
        ...

    async def load_view(self, tenant_id: str, view_id: str) -> SavedView:
        """Load a view. Raises `ViewNotFound`, also for a view of another tenant."""
        ...

    async def save_view(self, tenant_id: str, name: str, filters: Mapping[str, str], by: Actor) -> SavedView:
        """Save a new view. Raises `ViewExists` and `ViewLimitReached`."""
        ...

    async def rename_view(self, tenant_id: str, view_id: str, name: str, by: Actor) -> SavedView:
        """Rename a view and return it. Raises `ViewNotFound` and `ViewExists`."""
        ...

    async def delete_view(self, tenant_id: str, view_id: str, by: Actor) -> None:
        """Delete a view. Raises `ViewNotFound`."""
        ...
