"""A short chaos run with most kinds of fault, and tests that the checker finds damage.

The long run is `make test-faults`.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.chaos.checker import Findings, Reported, Rows, check_events, check_rows, sort_journal
from tests.faults.chaos.run import WEIGHTS, Plan, run_chaos
from tests.support.strata_process import PROJECT

SHORT = Plan(
    seed=20261118,
    kills=6,
    seconds=60,
    clients=4,
    conversations=2,
    servers=2,
    pause_seconds=(0.1, 0.4),
    # Without slow faults: failovers and silent databases have separate tests.
    weights={**WEIGHTS, "fail_over": 0, "swallow_database": 0, "fill_disk": 0},
)


async def test_nothing_is_lost_doubled_altered_or_stuck_under_any_fault(tmp_path: Path) -> None:
    outcome = await run_chaos(SHORT, tmp_path)
    assert outcome.is_clean, outcome.report()
    assert outcome.kills >= SHORT.kills
    # At least one turn in each conversation: its last, plain task.
    assert outcome.turns >= SHORT.clients * SHORT.conversations


def test_the_checker_imports_nothing_of_the_code_under_test() -> None:
    program = (
        "import sys, tests.faults.chaos.checker, tests.faults.chaos.client;"
        "sys.exit(any(name == 'server' or name.startswith('server.') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=False).returncode == 0


KEY, CONVERSATION = "c0-1", "conv_a"
TURN = {"seq": 2, "state": "complete"}
REQUEST = bytes(32)
STORED: list[dict[str, Any]] = [
    {
        "seq": 1,
        "kind": "user_task",
        "state": "complete",
        "blocks": json.dumps([{"type": "text", "text": "Hello."}]),
        "idempotency_key": KEY,
    },
    {"seq": 2, "kind": "model_response", "state": "complete", "blocks": "[]", "idempotency_key": None},
]
CALL = {
    "turn_seq": 2,
    "attempt": 1,
    "provider": "gemini",
    "request_hash": REQUEST,
    "status": 200,
    "error_code": None,
    "ended_at": "now",
    "raw_response": None,
    "raw_length": 0,
    "turn_state": "complete",
}
FACTS: list[dict[str, Any]] = [
    {"fact": "created", "conversation": CONVERSATION, "provider": "gemini"},
    {"fact": "sent", "key": KEY, "conversation": CONVERSATION, "body": {"input": "Hello."}},
    {"fact": "started", "key": KEY, "conversation": CONVERSATION, "input_seq": 1, "seq": 2},
    {"fact": "asked", "provider": "gemini", "number": 1, "request_sha256": REQUEST.hex(), "fuzzed": False},
    {"fact": "ended", "key": KEY, "conversation": CONVERSATION, "seq": 2, "turn": TURN},
]


def find(turns: list[dict[str, Any]], calls: list[dict[str, Any]], facts: list[dict[str, Any]]) -> Findings:
    findings = Findings()
    reported: Reported = sort_journal(iter(facts))
    stored: Any = turns, calls
    rows = Rows(turns={CONVERSATION: stored[0]}, calls={CONVERSATION: stored[1]})
    check_rows(Path(), reported, rows, findings)
    return findings


def test_the_checker_finds_nothing_in_correct_data() -> None:
    assert find(STORED, [CALL], FACTS).is_clean


DAMAGE: dict[str, tuple[str, Callable[[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]], None]]] = {
    "an input that is gone": ("lost", lambda turns, _calls, _facts: turns.clear()),
    "an answer that is gone": ("lost", lambda turns, _calls, _facts: turns.__delitem__(1)),
    "a request without a row": ("lost", lambda _turns, calls, _facts: calls.clear()),
    "an input that is there twice": ("doubled", lambda turns, _calls, _facts: turns.extend(deepcopy(turns))),
    "a number that is missing": ("doubled", lambda turns, _calls, _facts: turns[1].update(seq=3)),
    "a turn that was asked for again": ("doubled", lambda _turns, calls, _facts: calls.append({**CALL, "attempt": 2})),
    "a text that was changed": ("altered", lambda turns, _calls, _facts: turns[0].update(blocks='[{"text": "Bye."}]')),
    "an end that was another": ("altered", lambda turns, _calls, _facts: turns[1].update(state="interrupted")),
    "an input that nobody sent": ("doubled", lambda _turns, _calls, facts: facts.__delitem__(slice(1, 3))),
    "a client that gave up": (
        "stuck",
        lambda _turns, _calls, facts: facts.append({"fact": "stuck", "key": KEY, "conversation": CONVERSATION}),
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_checker_finds_the_damage(name: str) -> None:
    kind, damage = DAMAGE[name]
    turns, calls, facts = deepcopy(STORED), [deepcopy(CALL)], deepcopy(FACTS)
    damage(turns, calls, facts)
    assert getattr(find(turns, calls, facts), kind)


END = ("turn.completed", {"turn": TURN})
STREAM = [(1, "turn.started", {}), (2, "text.delta", {"text": "Hi"}), (3, *END)]


@pytest.mark.parametrize(
    ("received", "stored", "kind"),
    [
        ([(2, "text.delta", {"text": "Ho"})], STREAM, "altered"),
        ([(3, "turn.failed", {})], STREAM, "altered"),
        ([(3, "text.delta", {"text": "more"})], [STREAM[0], STREAM[1], (3, *END)], "lost"),
        ([], STREAM[:2], "lost"),
        ([], [STREAM[0], STREAM[2]], "doubled"),
        ([(2, "text.delta", {"text": "Hi"}), (3, *END)], STREAM, None),
    ],
)
def test_the_checker_compares_streams(
    received: list[tuple[int, str, Any]], stored: list[tuple[int, str, Any]], kind: str | None
) -> None:
    findings = Findings()
    events = [{"id": number, "name": name, "data": data} for number, name, data in received]
    check_events("conv_a/2", events, stored, findings)
    assert findings.is_clean if kind is None else getattr(findings, kind)
