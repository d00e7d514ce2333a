"""The settings of a policy are parsed strictly, and the docs list their defaults."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from server.conversation.block import JsonValue
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind, read_policy
from server.conversation.errors import ValidationFailed

COSTS = (Path(__file__).parents[3] / "docs/operations/costs.md").read_text()


def test_without_settings_the_defaults_apply() -> None:
    assert read_policy({}) == CompactionPolicy()
    assert read_policy({"policy": None, "max_turns": None}) == CompactionPolicy()


def test_every_member_is_read() -> None:
    settings = {
        "policy": "threshold",
        "keep_exchanges": 2,
        "fixed_cost_tokens": 0,
        "max_turns": 20,
        "max_tokens": 9000,
        "target_tokens": 3000,
        "window_share": 0.5,
        "signed": True,
    }
    expected = CompactionPolicy(
        kind=PolicyKind.THRESHOLD,
        keep_exchanges=2,
        fixed_cost_tokens=0,
        max_turns=20,
        max_tokens=9000,
        target_tokens=3000,
        window_share=0.5,
        signed=True,
    )
    assert read_policy(settings) == expected


def test_a_limit_of_turns_alone_is_the_only_limit() -> None:
    assert read_policy({"policy": "threshold", "max_turns": 20}).max_tokens is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "cheap"),
        ("policy", 1),
        ("keep_exchanges", 0),
        ("keep_exchanges", True),
        ("keep_exchanges", 2.5),
        ("fixed_cost_tokens", -1),
        ("max_turns", 0),
        ("max_tokens", "8000"),
        ("target_tokens", -1),
        ("target_tokens", 8_001),
        ("window_share", 0),
        ("window_share", 1.1),
        ("window_share", True),
        ("signed", 1),
        ("signed", "yes"),
        ("max_exchanges", 3),
    ],
)
def test_an_invalid_member_is_named(name: str, value: JsonValue) -> None:
    with pytest.raises(ValidationFailed) as caught:
        read_policy({name: value})
    errors = caught.value.details["errors"]
    assert isinstance(errors, list)
    assert [error["path"] for error in errors] == [f"settings.compaction.{name}"]


def test_the_docs_list_every_member_and_its_default() -> None:
    section = COSTS.partition("## Settings")[2].partition("\n## ")[0]
    written = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*?) \|", section, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(CompactionPolicy)}
    defaults["policy"] = defaults.pop("kind")
    assert written == {name: "none" if value is None else f"`{str(value).lower()}`" for name, value in defaults.items()}
