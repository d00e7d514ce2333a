"""The template files of the layers: where they are loaded from, and the errors of an invalid one."""

import hashlib
from pathlib import Path

import pytest

from server.conversation.errors import SettingsInvalid
from server.prompts.templates import load_templates
from tests.unit.house.repository import ROOT

BUILT_IN = sorted(path.name for path in (ROOT / "templates").glob("*.j2"))


def refusal(directory: Path) -> SettingsInvalid:
    with pytest.raises(SettingsInvalid) as caught:
        load_templates(directory)
    return caught.value


def test_the_built_in_templates_are_used_by_default() -> None:
    templates = load_templates(None)
    loaded = [*templates.static.values(), *templates.dynamic.values(), templates.segment, templates.summary]

    assert templates.static.keys() == templates.dynamic.keys() == {"gemini", "anthropic"}
    assert sorted(template.name for template in loaded) == BUILT_IN
    for template in loaded:
        assert template.source == (ROOT / "templates" / template.name).read_text(encoding="utf-8")
        assert template.sha256 == hashlib.sha256(template.source.encode()).digest()


def test_a_file_of_the_user_replaces_only_the_built_in_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "gemini_static_prompt.j2").write_bytes("\ufeffOurs: é\r\n{{ cached_history }}".encode())
    templates, built_in = load_templates(tmp_path), load_templates(None)

    assert templates.static["gemini"].source == "Ours: é\r\n{{ cached_history }}"
    assert templates.static["anthropic"].source == built_in.static["anthropic"].source
    assert templates.dynamic["gemini"].source == built_in.dynamic["gemini"].source


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("a\n{% if %}", 2, "Expected an expression"),
        ("a\n\n{{ roles | shout }}", 3, "No filter named 'shout'"),
        ("{% for i in [1] %}" * 40 + "{% endfor %}" * 40, 1, "nested"),
        ("a\n{{ system.current_date }}", 2, "`system` changes with every turn"),
        ("{{ message.text }}", 1, "`message` changes"),
        ("\n{{ conversation.duration }}", 2, "`conversation.duration` changes"),
        ("{% include 'x' %}", 1, "no other templates"),
        ("{{ cached_history }}\nThe end.", 1, "last thing"),
        ("{% if cached_history %}# History\n{{ cached_history }}{% endif %}", 1, "last thing"),
        ("{% if cached_history %}# History{% endif %}\n{{ cached_history }}", 1, "last thing"),
        ("{{ cached_history }}\n{{ cached_history }}", 1, "last thing"),
        ("a\n{{ cached_history | upper }}", 2, "last thing"),
        ("{% for _ in [1, 2] %}{{ cached_history }}{% endfor %}", 1, "last thing"),
        ("{% set h = cached_history %}{{ h }}", 1, "last thing"),
    ],
    ids=[
        "syntax",
        "no such filter",
        "no Python",
        "clock",
        "message",
        "duration",
        "include",
        "text after history",
        "conditional history",
        "heading that depends on history",
        "history twice",
        "filtered history",
        "history in a loop",
        "history by another name",
    ],
)
def test_an_invalid_static_template_is_named_with_its_line(source: str, line: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "anthropic_static_prompt.j2"
    path.write_text(source, encoding="utf-8")

    error = refusal(tmp_path)

    assert error.message.startswith(f"{path}, line {line}: ")
    assert reason in error.message
    assert "docs/guides/templates.md" in error.advice


@pytest.mark.parametrize(
    ("source", "reason"), [("{{ todos | tojson", "unexpected"), ("{% include 'x' %}", "no other templates")]
)
def test_an_invalid_dynamic_template_is_named(source: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "gemini_dynamic_prompt.j2"
    path.write_text(source, encoding="utf-8")

    error = refusal(tmp_path)

    assert error.message.startswith(f"{path}, line 1: ")
    assert reason in error.message


def test_a_dynamic_template_may_use_the_clock_and_the_message(tmp_path: Path) -> None:
    (tmp_path / "gemini_dynamic_prompt.j2").write_text(
        "[{{ system.date_unix }}, {{ message.text | tojson }}, {{ conversation.duration }}]", encoding="utf-8"
    )

    assert "system" in load_templates(tmp_path).dynamic["gemini"].source


@pytest.mark.parametrize(
    "source",
    ["", "no history", "{{ cached_history }}", "a\n\n{{- cached_history -}}\n\n", "a {{ cached_history }}{# end #}\n"],
)
def test_the_history_is_at_the_end_or_absent(source: str, tmp_path: Path) -> None:
    (tmp_path / "gemini_static_prompt.j2").write_text(source, encoding="utf-8")

    assert load_templates(tmp_path).static["gemini"].ends_in_history == ("cached_history" in source)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "gemini_static_prompt.j2").write_bytes(b"caf\xe9")

    assert "gemini_static_prompt.j2 is not UTF-8" in refusal(tmp_path).message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gemini_static_prompt.j2").mkdir()

    assert "gemini_static_prompt.j2 cannot be read" in refusal(tmp_path).message


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "STRATA_TEMPLATES_DIR" in refusal(tmp_path / "nowhere").message


def test_a_misspelt_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "claude_static_prompt.j2").write_text("x", encoding="utf-8")

    message = refusal(tmp_path).message

    assert "claude_static_prompt.j2" in message
    assert "anthropic_static_prompt.j2" in message


def test_other_files_in_the_directory_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes.j2").write_text("{% nonsense", encoding="utf-8")

    load_templates(tmp_path)


def test_a_history_template_whose_name_is_never_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history_segments.j2").write_text("{{ turns }}")
    assert "history_segments.j2 is not the name of a template" in str(refusal(tmp_path))
