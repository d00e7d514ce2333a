"""What the errors of Gemini's SDK mean. Apart from those of its answers, which are read without it."""

from google.genai import errors as sdk

from server.errors import ProviderFailed, ProviderMalformed
from server.gemini.errors import error_from_body
from server.wire.exchange import Recording


def translate_error(error: Exception, recording: Recording) -> ProviderFailed | None:
    """Our word for an error of the SDK."""
    match error:
        case sdk.APIError():
            body = error.details if isinstance(error.details, dict | list) else {}
            return error_from_body(body, recording.status or error.code)
        case sdk.UnknownApiResponseError():
            return ProviderMalformed()
        case _:
            return None
