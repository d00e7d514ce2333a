"""The pages as one router."""

from typing import Final

from litestar import Router
from litestar.di import Provide

from server.web.admin.action_pages import (
    cancel_on_page,
    compact_on_page,
    confirm_cancel,
    confirm_compaction,
    confirm_erasure,
    confirm_export,
    confirm_fork,
    confirm_undo,
    download_export,
    erase_on_page,
    fork_on_page,
    undo_on_page,
)
from server.web.admin.assets import show_asset
from server.web.admin.assistant_editing import check_draft, save_draft, show_editor
from server.web.admin.assistant_pages import (
    download_definition,
    show_assistant_page,
    show_assistants,
    show_version_page,
)
from server.web.admin.assistant_prompts import download_prompt, show_prompt
from server.web.admin.audit_pages import show_audit_log
from server.web.admin.call_pages import download_call, download_request, download_response, show_call
from server.web.admin.conversation_page import show_conversation_page
from server.web.admin.conversation_pages import show_conversations
from server.web.admin.conversation_parts import (
    follow_turn_on_page,
    show_image_on_page,
    show_whole_piece,
    show_whole_value,
)
from server.web.admin.key_pages import confirm_revocation, revoke_key_on_page, show_keys
from server.web.admin.login import log_in, log_out, show_login
from server.web.admin.overview_pages import show_overview_page
from server.web.admin.replay_action_pages import (
    confirm_replay_action,
    do_replay_action,
    show_replay_form,
    submit_replay_form,
)
from server.web.admin.replay_call_pages import (
    download_replayed_call,
    download_replayed_request,
    download_replayed_response,
    show_replayed_call_page,
)
from server.web.admin.replay_pages import (
    export_replay_page,
    show_replay_item,
    show_replay_items,
    show_replay_page,
    show_replay_progress,
    show_replays,
)
from server.web.admin.sessions import provide_session, require_session
from server.web.admin.view_pages import (
    confirm_view_deletion,
    delete_view_on_page,
    rename_view_on_page,
    save_view_on_page,
    show_views,
)

_FORM_LIMIT_BYTES: Final = 64 * 1024

OPEN_PAGES: Final = (show_login, log_in, log_out, show_asset)
"""What can be asked for without a session; logging out brings its own guard."""
PAGES: Final = (
    show_overview_page,
    show_conversations,
    show_views,
    save_view_on_page,
    rename_view_on_page,
    confirm_view_deletion,
    delete_view_on_page,
    show_conversation_page,
    follow_turn_on_page,
    show_image_on_page,
    show_whole_piece,
    show_whole_value,
    show_call,
    download_request,
    download_response,
    download_call,
    confirm_fork,
    fork_on_page,
    confirm_cancel,
    cancel_on_page,
    confirm_compaction,
    compact_on_page,
    confirm_undo,
    undo_on_page,
    confirm_export,
    download_export,
    confirm_erasure,
    erase_on_page,
    show_assistants,
    show_assistant_page,
    show_version_page,
    download_definition,
    show_prompt,
    download_prompt,
    show_editor,
    check_draft,
    save_draft,
    show_keys,
    confirm_revocation,
    revoke_key_on_page,
    show_audit_log,
    show_replays,
    show_replay_form,
    submit_replay_form,
    show_replay_page,
    show_replay_progress,
    show_replay_items,
    show_replay_item,
    show_replayed_call_page,
    download_replayed_request,
    download_replayed_response,
    download_replayed_call,
    export_replay_page,
    confirm_replay_action,
    do_replay_action,
)


def build_pages() -> Router:
    """Everything under `/admin` that is for people. It is not in the OpenAPI document, which is for programs."""
    return Router(
        "/admin",
        route_handlers=[*OPEN_PAGES, Router("/", route_handlers=list(PAGES), guards=[require_session])],
        dependencies={"session": Provide(provide_session)},
        include_in_schema=False,
        request_max_body_size=_FORM_LIMIT_BYTES,
    )
