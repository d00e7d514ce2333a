from collections.abc import Iterator

import pytest

from tests.support.fakes.log_capture import capture_log
from tests.support.fakes.telemetry import Watched


@pytest.fixture
def watched() -> Iterator[Watched]:
    """The telemetry of turns with spans in memory and the log in a text."""
    with capture_log() as log:
        yield Watched(log)
