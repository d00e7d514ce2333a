import asyncio
import io
import json
import logging
import re
import warnings
from typing import Any

import pytest

from server.conversation.errors import DatabaseUnavailable
from server.conversation.redaction import REDACTED
from server.telemetry.logs import begin_log_context, configure_logs, extend_log_context, redact_event, render_traceback
from tests.support.fakes.log_capture import capture_log

log = logging.getLogger("strata.test")
MARKER = "purple-elephant-content"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_has_one_object_per_line_with_fields() -> None:
    with capture_log() as stream:
        log.info("conversation.created", extra={"conversation_id": "conv_1", "turn_count": 2})
    (line,) = lines(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "conversation.created",
        "level": "info",
        "logger": "strata.test",
        "conversation_id": "conv_1",
        "turn_count": 2,
    }


def test_the_pretty_format_is_readable() -> None:
    with capture_log(log_format="pretty") as stream:
        log.warning("lease.lost", extra={"conversation_id": "conv_1"})
    text = stream.getvalue()
    assert "[warning  ] lease.lost" in text
    assert "conversation_id=conv_1" in text
    assert "\x1b[" not in text


def test_auto_is_pretty_on_a_terminal_and_json_otherwise() -> None:
    with capture_log():
        terminal, pipe = Terminal(), io.StringIO()
        for stream in (terminal, pipe):
            configure_logs("info", "auto", stream=stream)
            log.info("server.started")
    assert "\x1b[" in terminal.getvalue()
    assert lines(pipe.getvalue())[0]["event"] == "server.started"


@pytest.mark.parametrize(("level", "written"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_the_least_severe_that_is_written(level: str, written: int) -> None:
    with capture_log(level) as stream:
        for name in ("debug", "info", "warning", "error"):
            getattr(log, name)("it.happened")
    assert len(stream.getvalue().splitlines()) == written


def test_libraries_go_through_the_same_formatter_from_warnings_upwards() -> None:
    with capture_log() as stream:
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("alembic.runtime.migration").info("Running upgrade %s", "1")
        logging.getLogger("uvicorn.error").warning("Odd", extra={"color_message": "\x1b[32mOdd"})
        logging.getLogger("sqlalchemy.pool").warning("slow")
        logging.getLogger("uvicorn.access").info("GET /?secret")
        logging.getLogger("opentelemetry.exporter").error("no collector")
    assert [line["event"] for line in lines(stream.getvalue())] == ["Odd", "slow"]
    assert "color_message" not in stream.getvalue()


def test_a_warning_of_python_is_a_line_too() -> None:
    with capture_log() as stream, warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert lines(stream.getvalue())[0]["logger"] == "py.warnings"


def test_a_second_configuration_replaces_the_first() -> None:
    with capture_log() as first:
        second = io.StringIO()
        configure_logs("info", "json", stream=second)
        log.info("it.happened")
        assert first.getvalue() == ""
        assert len(second.getvalue().splitlines()) == 1


async def test_the_context_is_on_every_line_and_is_inherited_by_tasks() -> None:
    async def later() -> None:
        log.info("turn.finished")

    async def request(request_id: str) -> None:
        begin_log_context(request_id=request_id)
        log.info("request.begun")
        extend_log_context(tenant_id="tenant_1")
        await asyncio.create_task(later())

    with capture_log() as stream:
        await asyncio.gather(request("a"), request("b"))
        log.info("it.happened")
    found = lines(stream.getvalue())
    assert {(line["event"], line.get("request_id"), line.get("tenant_id")) for line in found} == {
        ("request.begun", "a", None),
        ("request.begun", "b", None),
        ("turn.finished", "a", "tenant_1"),
        ("turn.finished", "b", "tenant_1"),
        ("it.happened", None, None),
    }


def test_a_new_request_clears_the_context() -> None:
    with capture_log() as stream:
        begin_log_context(request_id="a", trace_id="t")
        begin_log_context(request_id="b")
        log.info("it.happened")
        begin_log_context()
    (line,) = lines(stream.getvalue())
    assert line["request_id"] == "b"
    assert "trace_id" not in line


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_an_exception_is_logged_with_its_location_and_without_its_text(log_format: Any) -> None:
    with capture_log(log_format=log_format) as stream:
        content = "purple-elephant-content"
        try:
            int(content)
        except ValueError:
            log.exception("it.failed", extra={"conversation_id": "conv_1"})
    assert "test_an_exception_is_logged" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert content not in stream.getvalue()


def test_a_line_break_in_a_value_does_not_forge_a_line() -> None:
    with capture_log() as stream:
        log.info("it.happened", extra={"title": 'x\n{"event": "forged"}'})
    assert len(stream.getvalue().splitlines()) == 1


def redact(**fields: object) -> dict[str, object]:
    return redact_event(None, "info", fields)


@pytest.mark.parametrize(
    "name",
    ["authorization", "Authorization", "cookie", "set-cookie", "api_key", "x-api-key", "apikey", "password",
     "db_password", "client_secret", "secret", "token", "access_token", "credentials", "database_url"],
)  # fmt: skip
def test_fields_with_a_sensitive_name_are_dropped(name: str) -> None:
    assert redact(**{name: "abc"}) == {name: REDACTED}
    assert redact(nested={"list": [{name: ["abc"]}]}) == {"nested": {"list": [{name: REDACTED}]}}
    assert redact(**{name: None}) == {name: None}


@pytest.mark.parametrize(
    "name", ["input_tokens", "api_key_id", "key_id", "tokens", "cache_read_tokens", "author", "event", "token_count"]
)
def test_fields_with_a_similar_name_are_kept(name: str) -> None:
    assert redact(**{name: "abc"}) == {name: "abc"}


def test_other_values_are_converted_to_something_loggable() -> None:
    class Thing:
        def __str__(self) -> str:
            return "password=hunter2"

    deep: object = "end"
    for _ in range(20):
        deep = [deep]
    left = redact(thing=Thing(), data=b"abc", kinds={"a"}, deep=deep, flag=True, ratio=0.5)
    assert left["thing"] == "password=[redacted]"
    assert left["data"] == "[3 bytes]"
    assert left["kinds"] == ["a"]
    assert (left["flag"], left["ratio"]) == (True, 0.5)
    assert re.search(r"too deep", str(left["deep"]))


def caught(code: str) -> BaseException:
    try:
        exec(code, {"MARKER": MARKER, "DatabaseUnavailable": DatabaseUnavailable})  # noqa: S102
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_frames_and_names_are_logged_and_the_text_is_not() -> None:
    text = render_traceback(caught("raise ValueError(MARKER)"))
    assert "in caught" in text
    assert text.endswith("ValueError")
    assert MARKER not in text


def test_our_own_errors_keep_their_text() -> None:
    assert render_traceback(DatabaseUnavailable("No route to host.")).startswith(
        "server.conversation.errors.DatabaseUnavailable: No route to host."
    )


def test_names_and_files_may_be_logged() -> None:
    assert "No such file" in render_traceback(caught("open('/nowhere/at/all')"))
    assert "has no attribute 'x'" in render_traceback(caught("None.x"))


def test_an_error_of_a_library_is_not_plain_because_its_base_is() -> None:
    class FetchError(OSError):
        """As in several HTTP clients."""

    assert MARKER not in render_traceback(FetchError(f"https://x.example/?q={MARKER}"))


def test_causes_come_first() -> None:
    error = caught("""
try:
    int(MARKER)
except ValueError as error:
    raise DatabaseUnavailable("Gone.") from error
""")
    text = render_traceback(error)
    assert text.index("ValueError") < text.index("Gone.")
    assert MARKER not in text


def test_the_context_is_included_unless_it_is_suppressed() -> None:
    shown = caught("""
try:
    1 / 0
except ZeroDivisionError:
    raise KeyError(MARKER)
""")
    hidden = caught("""
try:
    1 / 0
except ZeroDivisionError:
    raise KeyError(MARKER) from None
""")
    assert "ZeroDivisionError" in render_traceback(shown)
    assert "ZeroDivisionError" not in render_traceback(hidden)
    assert MARKER not in render_traceback(shown) + render_traceback(hidden)


def test_groups_show_their_parts() -> None:
    text = render_traceback(caught("raise ExceptionGroup(MARKER, [ValueError(MARKER), DatabaseUnavailable('Gone.')])"))
    assert "ExceptionGroup" in text
    assert "  | ValueError" in text
    assert "Gone." in text
    assert MARKER not in text


def test_a_cycle_and_an_endless_recursion_are_bounded() -> None:
    error = ValueError(MARKER)
    error.__cause__ = KeyError(MARKER)
    error.__cause__.__cause__ = error
    assert render_traceback(error).count("Error") == 2
    deep = caught("f = lambda: f()\nf()")
    assert len(render_traceback(deep).splitlines()) < 100
