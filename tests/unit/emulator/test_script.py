"""Scripts: which step a request gets, and the errors of an invalid script."""

from pathlib import Path

import pytest

from server.emulator.reply import Fault, FaultKind, Reply, ToolCall
from server.emulator.script import Script, ScriptInvalid, load_script


def taken(script: Script, *prompts: str) -> list[str | None]:
    turns = [script.take(number, prompt, after_tools=False) for number, prompt in enumerate(prompts, start=1)]
    return [turn.text if isinstance(turn, Reply) else turn.kind if turn else None for turn in turns]


def test_steps_are_taken_in_order_and_once() -> None:
    script = load_script("[{text: one}, {text: two}]")

    assert taken(script, "a", "b", "c") == ["one", "two", None]


def test_a_step_waits_for_its_prompt() -> None:
    script = load_script("[{when: Weather, text: sunny}, {text: hello}]")

    assert taken(script, "hi", "the weather?", "the weather?") == ["hello", "sunny", None]


def test_a_step_can_be_used_often() -> None:
    script = load_script("[{text: twice, times: 2}, {when: x, text: ever, times: always}]")

    assert taken(script, "a", "b", "x", "x", "y") == ["twice", "twice", "ever", "ever", None]


def test_the_step_after_a_fault_inherits_its_condition() -> None:
    script = load_script("[{fault: cut, when: go, times: 2, then: [{text: one}, {text: two}]}]")

    assert taken(script, "go", "stay", "go", "go", "go") == ["cut", None, "cut", "one", "two"]


def test_a_step_can_require_tool_results_or_a_number() -> None:
    script = load_script("[{after_tools: true, text: tools}, {at: 3, text: third}]")

    assert script.take(1, "", after_tools=False) is None
    assert script.take(2, "", after_tools=True) == Reply(text="tools")
    assert script.take(3, "", after_tools=True) == Reply(text="third")


def test_a_reply_and_a_fault_are_read_whole() -> None:
    script = load_script("""
    steps:
      - thinking: hm
        text: ok
        tool_calls: [{name: f, arguments: {a: [1, true]}}, {name: g}]
      - {fault: rate_limited, after_chunks: 2, retry_after: 1.5, message: slower}
    """)

    assert script.take(1, "", after_tools=False) == Reply(
        thinking="hm", text="ok", tool_calls=(ToolCall(name="f", arguments={"a": [1, True]}), ToolCall(name="g"))
    )
    assert script.take(2, "", after_tools=False) == Fault(
        kind=FaultKind.RATE_LIMITED, after_chunks=2, retry_after_seconds=1.5, message="slower"
    )


def test_a_script_can_be_a_file_and_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text("")

    assert load_script(path).take(1, "", after_tools=False) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- text: a\n- txet: b", "Line 2: unknown key 'txet'"),
        ("- text: a\n- when: b", "Line 2: a step is a reply"),
        ("- text: 1", "Line 1: text is a text; put it in quotes, not 1."),
        ("- fault: cutt", "Line 1: There is no fault 'cutt'"),
        ("- fault: cut\n  text: a", "Line 1: a fault has no text."),
        ("- text: a\n  then: {text: b}", "Line 1: a reply has no then."),
        ("- fault: cut\n  then:\n    foo: b", "Line 3: unknown key 'foo'"),
        ("- text: a\n  times: 0", "Line 2: times is a number from 1, or `always`."),
        ("- tool_calls: [{arguments: {}}]", "Line 1: a tool call has a name."),
        ("- tool_calls: {name: f}", "Line 1: tool_calls is a list."),
        ("hello", "Line 1: A script is a list."),
        ("[a", "This is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ScriptInvalid) as caught:
        load_script(text)

    assert str(caught.value).startswith(complaint)
