from server.conversation.errors import DatabaseUnavailable
from server.telemetry.tracebacks import render_traceback

MARKER = "purple-elephant-content"


def caught(code: str) -> BaseException:
    try:
        exec(code, {"MARKER": MARKER, "DatabaseUnavailable": DatabaseUnavailable})  # noqa: S102
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_frames_and_names_are_there_and_the_text_is_not() -> None:
    text = render_traceback(caught("raise ValueError(MARKER)"))
    assert "in caught" in text
    assert text.endswith("ValueError")
    assert MARKER not in text


def test_our_own_errors_keep_their_text() -> None:
    assert render_traceback(DatabaseUnavailable("No route to host.")).startswith(
        "server.conversation.errors.DatabaseUnavailable: No route to host."
    )


def test_names_and_files_may_be_said() -> None:
    assert "No such file" in render_traceback(caught("open('/nowhere/at/all')"))
    assert "has no attribute 'x'" in render_traceback(caught("None.x"))


def test_an_error_of_a_library_is_not_plain_because_its_base_is() -> None:
    class FetchError(OSError):
        """As those of several HTTP clients."""

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


def test_the_context_counts_unless_it_is_suppressed() -> None:
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


def test_a_circle_and_an_endless_recursion_come_to_an_end() -> None:
    error = ValueError(MARKER)
    error.__cause__ = KeyError(MARKER)
    error.__cause__.__cause__ = error
    assert render_traceback(error).count("Error") == 2
    deep = caught("f = lambda: f()\nf()")
    assert len(render_traceback(deep).splitlines()) < 100
