"""Saved views: filters of the list of conversations that operators come back to, by name.

A view keeps the filters as the list's address has them, so whoever opens it sees what the list shows now; one that says
"the last seven days" goes on saying so. Views belong to a tenant, and whoever may see the tenant's list sees them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from server.conversation.audit import Actor
from server.conversation.errors import ValidationFailed

VIEW_LIMIT: Final = 50
"""More views than this nobody finds again."""
NAME_LIMIT: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """Filters with a name."""

    id: str
    name: str
    filters: Mapping[str, str]
    """As they stand in the address; never empty."""
    key_id: str | None
    """Of whoever saved it."""
    created_at: datetime


def clean_name(name: str) -> str:
    """A name as it is kept: no space around it, one blank wherever there is more. Raises `ValidationFailed`."""
    cleaned = " ".join(name.split())
    if not 0 < len(cleaned) <= NAME_LIMIT:
        sentence = f"It has 1 to {NAME_LIMIT} characters."
        fault = {"path": "name", "source": "body", "message": sentence}
        raise ValidationFailed(
            f"The view cannot have this name. {sentence}", hint="Go back and correct it.", errors=[fault]
        )
    return cleaned


class SavedViews(Protocol):
    """The views. What changes them is audited in the same transaction. Raises `DatabaseUnavailable` from any method."""

    async def list_views(self, tenant_id: str) -> Sequence[SavedView]:
        """All of them, by name: there are few."""
        ...

    async def load_view(self, tenant_id: str, view_id: str) -> SavedView:
        """Raises `ViewNotFound`, also for one of another tenant."""
        ...

    async def save_view(self, tenant_id: str, name: str, filters: Mapping[str, str], by: Actor) -> SavedView:
        """A new one. Raises `ViewExists` and `ViewLimitReached`."""
        ...

    async def rename_view(self, tenant_id: str, view_id: str, name: str, by: Actor) -> SavedView:
        """The view as it is called now. Raises `ViewNotFound` and `ViewExists`."""
        ...

    async def delete_view(self, tenant_id: str, view_id: str, by: Actor) -> None:
        """Raises `ViewNotFound`."""
        ...
