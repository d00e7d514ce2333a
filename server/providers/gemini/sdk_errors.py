"""Translation of the errors of Gemini's SDK. `errors` translates error responses, without importing the SDK."""

from typing import Final

from google.genai import errors as sdk

from server.conversation.errors import ProviderFailed, ProviderMalformed
from server.providers.gemini.errors import error_from_body, error_from_recording
from server.providers.wire.exchange import Recording

_ERRORS: Final = 400


def translate_error(error: Exception, recording: Recording) -> ProviderFailed | None:
    """Translate an error of the SDK; None for a bug.

    Error responses are read from the recording, because the SDKs fail to read some of them.
    """
    if recording.status is not None and recording.status >= _ERRORS:
        return error_from_recording(recording)
    match error:
        case sdk.APIError():
            body = error.details if isinstance(error.details, dict | list) else {}
            return error_from_body(body, recording.status or error.code)
        case sdk.UnknownApiResponseError():
            return ProviderMalformed()
        case _:
            return None
