"""What the errors of Claude's SDK mean. Apart from those of its answers, which are read without it."""

import anthropic as sdk

from server.anthropic.errors import error_from_body
from server.errors import ProviderFailed, ProviderTimedOut, ProviderUnavailable
from server.wire.exchange import Recording


def translate_error(error: Exception, recording: Recording) -> ProviderFailed | None:
    """Our word for an error of the SDK."""
    match error:
        case sdk.APIStatusError():
            body = error.body if isinstance(error.body, dict) else {}
            return error_from_body(body, recording)
        case sdk.APITimeoutError():
            return ProviderTimedOut()
        case sdk.APIConnectionError():
            return ProviderUnavailable("The provider cannot be reached.")
        case _:
            return None
