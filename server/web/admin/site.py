"""The router of the pages."""

from typing import Final

from litestar import Router
from litestar.di import Provide

from server.web.admin import (
    action_pages,
    assets,
    assistant_editing,
    assistant_pages,
    audit_pages,
    call_pages,
    conversation_list_pages,
    conversation_pages,
    key_pages,
    login,
    overview_pages,
    replay_action_pages,
    replay_call_pages,
    replay_pages,
)
from server.web.admin.sessions import provide_session, require_session

_FORM_LIMIT_BYTES: Final = 64 * 1024

OPEN_PAGES: Final = (login.show_login, login.log_in, login.log_out, assets.show_asset)
"""Pages that need no session. Logging out has its own guard."""
PAGES: Final = (
    overview_pages.show_overview_page,
    conversation_list_pages.show_conversations,
    conversation_list_pages.show_views,
    conversation_list_pages.save_view_on_page,
    conversation_list_pages.rename_view_on_page,
    conversation_list_pages.confirm_view_deletion,
    conversation_list_pages.delete_view_on_page,
    conversation_pages.show_conversation_page,
    conversation_pages.follow_turn_on_page,
    conversation_pages.show_image_on_page,
    conversation_pages.show_whole_piece,
    conversation_pages.show_whole_value,
    call_pages.show_call,
    call_pages.download_request,
    call_pages.download_response,
    call_pages.download_call,
    action_pages.confirm_fork,
    action_pages.fork_on_page,
    action_pages.confirm_cancel,
    action_pages.cancel_on_page,
    action_pages.confirm_compaction,
    action_pages.compact_on_page,
    action_pages.confirm_undo,
    action_pages.undo_on_page,
    action_pages.confirm_export,
    action_pages.download_export,
    action_pages.confirm_erasure,
    action_pages.erase_on_page,
    assistant_pages.show_assistants,
    assistant_pages.show_assistant_page,
    assistant_pages.show_version_page,
    assistant_pages.download_definition,
    assistant_pages.show_prompt,
    assistant_pages.download_prompt,
    assistant_editing.show_editor,
    assistant_editing.check_draft,
    assistant_editing.save_draft,
    key_pages.show_keys,
    key_pages.confirm_revocation,
    key_pages.revoke_key_on_page,
    audit_pages.show_audit_log,
    replay_pages.show_replays,
    replay_action_pages.show_replay_form,
    replay_action_pages.submit_replay_form,
    replay_pages.show_replay_page,
    replay_pages.show_replay_progress,
    replay_pages.show_replay_items,
    replay_pages.show_replay_item,
    replay_call_pages.show_replayed_call_page,
    replay_call_pages.download_replayed_request,
    replay_call_pages.download_replayed_response,
    replay_call_pages.download_replayed_call,
    replay_pages.export_replay_page,
    replay_action_pages.confirm_replay_action,
    replay_action_pages.do_replay_action,
)


def build_pages() -> Router:
    """Build the router of the pages. They are not in the OpenAPI document, which is for programs."""
    return Router(
        "/admin",
        route_handlers=[*OPEN_PAGES, Router("/", route_handlers=list(PAGES), guards=[require_session])],
        dependencies={"session": Provide(provide_session)},
        include_in_schema=False,
        request_max_body_size=_FORM_LIMIT_BYTES,
    )
