"""What the errors of Gemini's SDK mean. Apart from those of its answers, which are read without it."""

from typing import Final

from google.genai import errors as sdk

from server.conversation.errors import ProviderFailed, ProviderMalformed
from server.providers.gemini.errors import error_from_body, error_from_recording
from server.providers.wire.exchange import Recording

_ERRORS: Final = 400


def translate_error(error: Exception, recording: Recording) -> ProviderFailed | None:
    """Our word for an error of the SDK. A response that is an error is read as recorded: the SDK stumbles over some."""
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
