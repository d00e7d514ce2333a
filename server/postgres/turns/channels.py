"""The channels on which processes tell each other that something happened, and what is said on them.

An announcement is part of the statement that makes it true: Postgres passes it on when that has been committed, and
never otherwise.
"""

from collections.abc import Mapping
from typing import Final

from server.conversation.notifications import Notification

CONVERSATION_CHANNEL: Final = "strata_conversations"
"""The UUID of a conversation and the letter of what happened to it."""
KEY_CHANNEL: Final = "strata_keys"
"""The UUID of an API key that was revoked."""
CHANNELS: Final = (CONVERSATION_CHANNEL, KEY_CHANNEL)

NEWS_BY_LETTER: Final[Mapping[str, Notification]] = {
    "g": Notification.GROWN,
    "e": Notification.ENDED,
    "c": Notification.CANCELLING,
}
_LETTERS: Final = {news: letter for letter, news in NEWS_BY_LETTER.items()}


def announce_sql(news: Notification, conversation: str) -> str:
    """SQL that announces it, for the list of a SELECT: `conversation` is an expression for the UUID.

    In the list, and not in a WITH: a SELECT there that nobody reads is not run. Compared with NULL, since asyncpg is
    not to make anything of a `void`.
    """
    return f"pg_notify('{CONVERSATION_CHANNEL}', {conversation}::text || '{_LETTERS[news]}') IS NULL"
