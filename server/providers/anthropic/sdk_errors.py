"""Translation of the errors of Claude's SDK. `errors` translates error responses, without importing the SDK."""

from typing import Final

import anthropic as sdk

from server.conversation.errors import ProviderFailed, ProviderTimedOut, ProviderUnavailable
from server.providers.anthropic.errors import error_from_body, error_from_recording
from server.providers.wire.exchange import Recording

_ERRORS: Final = 400


def translate_error(error: Exception, recording: Recording) -> ProviderFailed | None:
    """Translate an error of the SDK; None for a bug.

    Error responses are read from the recording, because the SDKs fail to read some of them.
    """
    if recording.status is not None and recording.status >= _ERRORS:
        return error_from_recording(recording)
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
