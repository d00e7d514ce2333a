"""What a static text may not depend on."""

import pytest

from server.prompts.analysis import Fault, find_fault, find_loading
from server.prompts.environment import Sandbox

SANDBOX = Sandbox()


def fault_in(source: str) -> Fault | None:
    return find_fault(SANDBOX.parse(source))


@pytest.mark.parametrize(
    ("source", "named", "line"),
    [
        ("{{ system.current_date }}", "`system`", 1),
        ("\n{{ system }}", "`system`", 2),
        ("{% if system.day_of_week == 'Monday' %}{% endif %}", "`system`", 1),
        ("{% for key in system %}{% endfor %}", "`system`", 1),
        ("{% set now = system %}{{ now.current_date }}", "`system`", 1),
        ("{{ system['current_date'] | upper }}", "`system`", 1),
        ("{% macro m(x) %}{{ x }}{{ system.date_unix }}{% endmacro %}", "`system`", 1),
        ("{{ system }}{% set system = 1 %}", "`system`", 1),
        ("a\n\n{{ message.text }}", "`message`", 3),
        ("{{ conversation.duration }}", "`conversation.duration`", 1),
        ("{{ conversation['updated_date'] }}", "`conversation.updated_date`", 1),
        ("{{ conversation.id }}\n{{ conversation.updated_date }}", "`conversation.updated_date`", 2),
    ],
)
def test_references_to_the_clock_and_the_message_are_found(source: str, named: str, line: int) -> None:
    fault = fault_in(source)

    assert fault is not None
    assert fault.message.startswith(named)
    assert fault.line == line


@pytest.mark.parametrize(
    "source",
    [
        "plain",
        "{{ assistant.name }} {{ conversation.id }} {{ session.mode }} {{ args.system }} {{ tone }}",
        "{% set system = 'ours' %}{{ system }}",
        "{% for message in args.messages %}{{ message }}{% endfor %}",
        "{% macro greet(message) %}{{ message }}{% endmacro %}{{ greet('hi') }}",
        "{{ other.duration }} {{ conversation.created_date }}",
        "{# {{ system.current_date }} #}{% raw %}{{ system.current_date }}{% endraw %}",
    ],
)
def test_local_names_and_constant_values_are_allowed(source: str) -> None:
    assert fault_in(source) is None


@pytest.mark.parametrize(
    "source", ["\n{% include 'x' %}", "\n{% extends 'x' %}", "\n{% import 'x' as x %}", "\n{% from 'x' import y %}"]
)
def test_a_tag_that_includes_another_template_is_found(source: str) -> None:
    fault = find_loading(SANDBOX.parse(source))

    assert fault is not None
    assert fault.line == 2
    assert fault_in(source) == fault
