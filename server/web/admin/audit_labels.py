"""The audit log in words for operators: what an action is called, and where its object can be looked at."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from server.conversation.audit import Action
from server.conversation.identifiers import API_KEY, ASSISTANT, CONVERSATION, REPLAY, SAVED_VIEW, decode_id

ACTION_NAMES: Final[Mapping[str, str]] = {
    Action.LOGIN: "Login",
    Action.LOGOUT: "Logout",
    Action.CREATE_KEY: "Key created",
    Action.REVOKE_KEY: "Key revoked",
    Action.FORK: "Conversation forked",
    Action.CANCEL: "Turn cancelled",
    Action.COMPACT: "Conversation compacted",
    Action.UNDO_COMPACTION: "Compaction undone",
    Action.ERASE: "Conversation deleted",
    Action.EXPORT: "Conversation exported",
    Action.IMPORT: "Conversation imported",
    Action.SAVE_ASSISTANT: "Assistant saved",
    Action.SAVE_VIEW: "View saved",
    Action.RENAME_VIEW: "View renamed",
    Action.DELETE_VIEW: "View deleted",
    Action.CREATE_REPLAY: "Replay started",
    Action.PAUSE_REPLAY: "Replay paused",
    Action.CONTINUE_REPLAY: "Replay continued",
    Action.CANCEL_REPLAY: "Replay cancelled",
    Action.ERASE_REPLAY: "Replay deleted",
    Action.READ_OTHER_TENANT: "Read across tenants",
}
_PAGES: Final[Mapping[str, str]] = {
    CONVERSATION: "/admin/conversations/{}",
    ASSISTANT: "/admin/assistants/{}",
    API_KEY: "/admin/keys#{}",
    SAVED_VIEW: "/admin/views#{}",
    REPLAY: "/admin/replays/{}",
}


def name_action(action: str) -> str:
    """What people call it. One of a later release is named as it is."""
    return ACTION_NAMES.get(action, action)


def object_url(object_id: object) -> str | None:
    """The page of what has this id; None for what is no id, or has no page."""
    for prefix, page in _PAGES.items():
        if isinstance(object_id, str) and decode_id(prefix, object_id) is not None:
            return page.format(quote(object_id))
    return None
