"""Holes: texts that an SDK writes in place of JSON that is there already. `providers.wire.transport` fills them."""

import secrets


class Placeholders:
    """Those of one request. Nobody can have written one before."""

    def __init__(self) -> None:
        self._prefix = f"@strata:{secrets.token_hex(8)}"
        self.contents: dict[str, bytes] = {}

    def make(self, content: bytes) -> str:
        """A text that the content will stand for."""
        placeholder = f"{self._prefix}:{len(self.contents)}"
        self.contents[placeholder] = content
        return placeholder
