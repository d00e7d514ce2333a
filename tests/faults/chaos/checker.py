"""The independent checker of a chaos run: `python -m tests.faults.chaos.checker DIRECTORY DATABASE_URL SERVER_URL KEY`.

It imports nothing of the code under test. What must hold is derived from the journal alone, and compared with the rows
of the database, read by plain SQL, and with the responses of the HTTP API:

- **lost**: every acknowledged input is stored; every end that a client received is stored; every request that reached a
  provider has a call row; every answer that a provider sent to its end for a complete turn is kept, byte for byte.
- **doubled**: no idempotency key has two turns; no input has two answers; numbers have no gaps and no repeats; no
  provider was called again for an input after the server had received a whole answer.
- **altered**: inputs are stored as sent; turns are returned as first reported; an event number never has two meanings.
- **stuck**: no lease, no queue ticket, no open call, no unfinished chunk is left, and no client gave up.
"""

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import zstandard

from tests.faults.chaos.journal import read_answer, read_journal

ENDS = frozenset({"turn.completed", "turn.failed", "turn.cancelled"})
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(slots=True, kw_only=True)
class Findings:
    """Violations by kind. Empty lists mean that the guarantees held."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.altered or self.stuck)

    def report(self) -> str:
        lines = [f"{name}: {len(getattr(self, name))}" for name in ("lost", "doubled", "altered", "stuck")]
        lines += [f"{name}: {number}" for name, number in sorted(self.counts.items())]
        for name in ("lost", "doubled", "altered", "stuck"):
            lines += [f"  {name}: {sentence}" for sentence in getattr(self, name)[:40]]
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class Reported:
    """The journal, sorted."""

    conversations: dict[str, str] = field(default_factory=dict)
    sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    answered: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    stuck: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def sort_journal(facts: Iterator[dict[str, Any]]) -> Reported:
    reported = Reported()
    for fact in facts:
        match fact["fact"]:
            case "created":
                reported.conversations[fact["conversation"]] = fact["provider"]
            case "sent" | "started" | "ended" | "refused" as kind:
                getattr(reported, kind)[fact["key"]] = fact
            case "event":
                reported.events[fact["conversation"], fact["seq"]].append(fact)
            case "asked" | "answered" as kind:
                getattr(reported, kind)[fact["provider"], fact["number"]] = fact
            case "stuck":
                reported.stuck.append(fact)
            case "fault":
                reported.faults[fact["kind"]] += 1
            case other:
                raise ValueError(other)
    return reported


async def check(directory: Path, database_url: str, server_url: str, key: str) -> Findings:
    """Check everything. The servers must be up and no turn may run."""
    reported = sort_journal(read_journal(directory))
    findings = Findings()
    connection = await asyncpg.connect(database_url)
    try:
        rows = await _read_rows(connection, reported)
        check_rows(directory, reported, rows, findings)
        await _check_leftovers(connection, findings)
    finally:
        await connection.close()
    async with httpx2.AsyncClient(
        base_url=server_url, headers={"authorization": f"Bearer {key}"}, timeout=60
    ) as client:
        await _check_api(client, reported, findings)
    findings.counts = {
        "conversations": len(reported.conversations),
        "inputs sent": len(reported.sent),
        "ends told": len(reported.ended),
        "provider requests": len(reported.asked),
        "call rows": sum(map(len, rows.calls.values())),
        **{f"fault {kind}": number for kind, number in reported.faults.items()},
    }
    return findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of the conversations, oldest first."""

    turns: Mapping[str, Sequence[asyncpg.Record]]
    calls: Mapping[str, Sequence[asyncpg.Record]]


async def _read_rows(connection: "asyncpg.Connection[asyncpg.Record]", reported: Reported) -> Rows:
    turns, calls = {}, {}
    for conversation in reported.conversations:
        found = await connection.fetch(
            """SELECT seq, kind, state, blocks::text AS blocks, idempotency_key FROM turns
            WHERE conversation_id = $1 ORDER BY seq""",
            _uuid_of(conversation),
        )
        turns[conversation] = found
        calls[conversation] = await connection.fetch(
            """SELECT c.turn_seq, c.attempt, c.provider, c.request_hash, c.status, c.error_code, c.ended_at,
                c.raw_response, c.raw_length, t.state AS turn_state
            FROM calls c LEFT JOIN turns t ON t.conversation_id = c.conversation_id AND t.seq = c.turn_seq
            WHERE c.conversation_id = $1 ORDER BY c.turn_seq, c.attempt""",
            _uuid_of(conversation),
        )
    return Rows(turns=turns, calls=calls)


def check_rows(directory: Path, reported: Reported, rows: Rows, findings: Findings) -> None:
    """Compare the rows with the journal."""
    _check_inputs(reported, rows, findings)
    _check_order(reported, rows, findings)
    _check_calls(directory, reported, rows, findings)
    findings.stuck += [f"the client gave up on {fact['key']}" for fact in reported.stuck]


def _check_inputs(reported: Reported, rows: Rows, findings: Findings) -> None:
    stored: dict[str, list[tuple[str, asyncpg.Record]]] = defaultdict(list)
    for conversation, turns in rows.turns.items():
        for turn in turns:
            if turn["idempotency_key"] is not None:
                stored[turn["idempotency_key"]].append((conversation, turn))
    for key in reported.sent:
        found = stored.get(key, [])
        acknowledged = key in reported.started or key in reported.ended
        if acknowledged and not found:
            findings.lost.append(f"input {key} was acknowledged and is not stored")
        if len(found) > 1:
            findings.doubled.append(f"input {key} is stored {len(found)} times")
        for conversation, turn in found:
            _check_input(reported, key, conversation, turn, findings)
    for key in stored.keys() - reported.sent.keys():
        findings.doubled.append(f"input {key} is stored and nobody sent it")


def _check_input(reported: Reported, key: str, conversation: str, turn: asyncpg.Record, findings: Findings) -> None:
    sent = reported.sent[key]
    if conversation != sent["conversation"] or not _reads_as_sent(turn, sent["body"]):
        findings.altered.append(f"input {key} does not read as it was sent")
    if key in reported.started and turn["seq"] != reported.started[key]["input_seq"]:
        findings.altered.append(f"input {key} was told to have another number")
    if key in reported.refused:
        findings.altered.append(f"input {key} was refused and is stored")


def _reads_as_sent(turn: asyncpg.Record, body: dict[str, Any]) -> bool:
    blocks = json.loads(turn["blocks"])
    if "input" in body:
        return bool([block["text"] for block in blocks] == [body["input"]])
    wanted = [(result["tool_call_id"], result["output"]) for result in body["tool_results"]]
    return bool(
        turn["kind"] == "tool_response"
        and sorted((block["tool_call_id"], json.dumps(block["output"])) for block in blocks)
        == sorted((call_id, json.dumps(output)) for call_id, output in wanted)
    )


def _check_order(reported: Reported, rows: Rows, findings: Findings) -> None:
    for conversation, turns in rows.turns.items():
        seqs = [turn["seq"] for turn in turns]
        if seqs != list(range(1, len(seqs) + 1)):
            findings.doubled.append(f"{conversation}: the numbers of its turns are {seqs}")
        # Each input is followed by its answer before the next input.
        kinds = [turn["kind"] == "model_response" for turn in turns]
        if kinds != [False, True] * (len(kinds) // 2):
            findings.lost.append(f"{conversation}: an input has no answer, or two of them")
    for key, ended in reported.ended.items():
        turns = rows.turns.get(ended["conversation"], ())
        answer = next((turn for turn in turns if turn["seq"] == ended["seq"]), None)
        if answer is None:
            findings.lost.append(f"the end of {key} was told and is not stored")
        elif answer["state"] != ended["turn"]["state"]:
            findings.altered.append(f"{key} was told to be {ended['turn']['state']} and is {answer['state']}")


def _check_calls(directory: Path, reported: Reported, rows: Rows, findings: Findings) -> None:
    """Compare requests by their hash, regardless of their conversation: no two conversations send the same."""
    recorded: dict[str, list[asyncpg.Record]] = defaultdict(list)
    unknown = 0
    for calls in rows.calls.values():
        for call in calls:
            if call["request_hash"]:
                recorded[call["request_hash"].hex()].append(call)
            else:
                unknown += 1
    requests: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for place, asked in reported.asked.items():
        requests[asked["request_sha256"]].append({**asked, **reported.answered.get(place, {})})
    unrecorded = sum(max(0, len(asked) - len(recorded.get(key, ()))) for key, asked in requests.items())
    if unrecorded > unknown:
        findings.lost.append(
            f"{unrecorded} requests that providers received have no call row, and only {unknown} rows have no hash"
        )
    for key, calls in recorded.items():
        sent = [read_answer(directory, asked["file"]) for asked in requests.get(key, []) if "file" in asked]
        for call in calls:
            _check_bytes(call, sent, findings)
    for conversation, calls in rows.calls.items():
        whole: dict[int, int] = defaultdict(int)
        for call in calls:
            # A paused answer is continued by another call of the same turn.
            is_last = _is_whole(call) and b'"pause_turn"' not in _read_kept(call)
            whole[call["turn_seq"]] += call["turn_seq"] > 0 and is_last
        findings.doubled += [
            f"{conversation}: turn {seq} was asked for again after a whole answer"
            for seq, number in whole.items()
            if number > 1
        ]


def _check_bytes(call: asyncpg.Record, sent: Sequence[bytes], findings: Findings) -> None:
    """What is stored of an answer is what was sent, to the last byte or up to the break."""
    if call["raw_response"] is None:
        return
    kept = _read_kept(call)
    if not any(body.startswith(kept) for body in sent) and kept:
        findings.altered.append(f"the answer kept for turn {call['turn_seq']} is not what was sent")
    if _is_whole(call) and kept not in sent:
        findings.lost.append(f"the answer kept for turn {call['turn_seq']} is not all that was sent")


def _read_kept(call: asyncpg.Record) -> bytes:
    if not call["raw_length"]:
        return b""
    return zstandard.ZstdDecompressor().decompress(call["raw_response"], max_output_size=1 << 28)


def _is_whole(call: asyncpg.Record) -> bool:
    """Whether the server treated an answer as complete. A cancelled one has no error either, but its turn has the
    state.
    """
    good = call["status"] == 200 and call["error_code"] is None and call["ended_at"] is not None
    return bool(good and call["turn_state"] == "complete")


async def _check_leftovers(connection: "asyncpg.Connection[asyncpg.Record]", findings: Findings) -> None:
    left = {
        "leases": "SELECT count(*) FROM conversations WHERE lease_token IS NOT NULL",
        "tickets": "SELECT count(*) FROM waiting_turns WHERE expires_at > now()",
        "chunks": "SELECT count(*) FROM call_chunks",
        "open calls": "SELECT count(*) FROM calls WHERE ended_at IS NULL AND turn_seq > 0",
    }
    for name, sql in left.items():
        if number := await connection.fetchval(sql):
            findings.stuck.append(f"{number} {name} are left")


async def _check_api(client: httpx2.AsyncClient, reported: Reported, findings: Findings) -> None:
    for key, ended in reported.ended.items():
        path = f"/v1/conversations/{ended['conversation']}/turns/{ended['seq']}"
        now = await client.get(path)
        if now.status_code != 200:
            findings.lost.append(f"the answer to {key} reads as {now.status_code}")
        elif now.json() != ended["turn"]:
            findings.altered.append(f"the answer to {key} reads otherwise than it was told")
    for (conversation, seq), events in reported.events.items():
        streamed = [event async for event in _stream(client, f"/v1/conversations/{conversation}/turns/{seq}/events")]
        check_events(f"{conversation}/{seq}", events, streamed, findings)


def check_events(
    name: str, received: Sequence[dict[str, Any]], stored: Sequence[tuple[int, str, Any]], findings: Findings
) -> None:
    """Compare the events that a client received with those that the stream returns now."""
    if not stored or stored[-1][1] not in ENDS:
        findings.lost.append(f"the stream of {name} has no end")
        return
    if [number for number, _, _ in stored] != list(range(1, len(stored) + 1)):
        findings.doubled.append(f"the stream of {name} has gaps or repeats")
    by_number = {number: (event, data) for number, event, data in stored[:-1]}
    last = stored[-1][1:]
    for event in received:
        if event["name"] in ENDS:
            if (event["name"], event["data"]) != last:
                findings.altered.append(f"the stream of {name} ended otherwise before")
        elif event["id"] in by_number:
            if (event["name"], event["data"]) != by_number[event["id"]]:
                findings.altered.append(f"event {event['id']} of {name} means two things")
        elif last[0] == "turn.completed":
            findings.lost.append(f"event {event['id']} of {name}, which is complete, is gone")


async def _stream(client: httpx2.AsyncClient, path: str) -> Any:
    async with client.stream("GET", path, headers={"accept": "text/event-stream"}) as answer:
        fields: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                fields = {}


def _uuid_of(public_id: str) -> UUID:
    """An id of the API is a prefix and a UUID in Crockford's base 32."""
    number = 0
    for character in public_id.partition("_")[2]:
        number = number * 32 + _ALPHABET.index(character)
    return UUID(int=number)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("directory", "database_url", "server_url", "key"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    findings = asyncio.run(
        check(Path(arguments.directory), arguments.database_url, arguments.server_url, arguments.key)
    )
    print(findings.report())  # noqa: T201  reason: a program's output
    sys.exit(0 if findings.is_clean else 1)


if __name__ == "__main__":
    main()
