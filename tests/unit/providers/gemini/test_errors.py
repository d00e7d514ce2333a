"""The meaning of the errors of Gemini."""

import pytest

from server.conversation.errors import CacheGone, ProviderAuthentication, ProviderFailed, ProviderRejected
from server.providers.gemini.errors import error_from_body


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, "CachedContent not found (or permission denied)", CacheGone),
        (404, "CachedContent not found (or permission denied)", CacheGone),
        (404, "Requested entity was not found: cachedContents/abc", CacheGone),
        (400, "Cache content 7 is expired: cached content cachedContents/7 has expired.", CacheGone),
        (403, "Permission denied on resource cachedContents/abc", CacheGone),
        (403, "Permission denied on project x", ProviderAuthentication),
        (404, "models/gemini-9 is not found for API version v1beta", ProviderRejected),
        (400, "Cached content is too small. total_token_count=896, min_total_token_count=1024", ProviderRejected),
        (
            400,
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools, ...",
            ProviderRejected,
        ),
    ],
)
def test_a_missing_cache_is_distinguished_from_other_errors(
    status: int, message: str, kind: type[ProviderFailed]
) -> None:
    found = error_from_body({"error": {"code": status, "message": message}}, status)
    assert type(found) is kind
