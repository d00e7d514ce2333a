"""Every statement of the request path restricts each table of a conversation by the conversation id parameter itself.

So a hash-partitioned table is pruned to one partition, and a distributed one is read on one node.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from server.postgres.engine import Statement
from server.postgres.schema import metadata
from tests.support.sql_restrictions import StatementCheck

KEYS: Final = {
    **{table.name: "conversation_id" for table in metadata.sorted_tables if "conversation_id" in table.c},
    "conversations": "id",
}
"""By table of a conversation: the column with its id."""

REFERENCE_TABLES: Final = {
    "tenants": "few and small rows; read with every key",
    "api_keys": "few and small rows; found by their hash",
    "assistants": "shared by the conversations of a tenant; a version never changes",
    "templates": "shared by all conversations; a source never changes",
    "provider_caches": "shared by the conversations with the same static text",
    "blobs": "stored once per tenant, by content hash, and shared by its conversations",
}
"""The tables of the request path that do not belong to one conversation, and why."""

REQUEST_PATH: Final = (
    "turns.accept",
    "turns.running",
    "turns.leases",
    "turns.queue",
    "turns.reading",
    "payload.loading",
    "payload.manifests",
    "conversation.conversations",
    "conversation.forks",
    "compaction.epochs",
    "caching",
)
PARAMETERS: Final = frozenset({"conversation", "fork"})
"""The names of parameters with the id of a conversation. A fork writes a new one, by its own id."""

EXEMPT: Final = {
    ("turns.leases", "_LIST_EXPIRED"): "recovery: searches all conversations for expired leases",
    ("turns.leases", "_SURRENDER"): "shutdown: all leases of a process",
    ("turns.reading", "_BLOB"): "operators: a blob of a tenant, in whichever conversation",
    ("conversation.conversations", "_LISTS"): "lists the conversations of a tenant",
    ("caching", "_DROP_EXPIRED_OF_KEY"): "a cache that has expired, with all of its uses",
    ("caching", "_DROP"): "a cache that the provider no longer has, with all of its uses",
    ("caching", "_DROP_EXPIRED"): "sweep: all conversations",
    ("caching", "_END_USES"): "sweep: all conversations",
    ("caching", "_CLAIM"): "sweep: all conversations",
}
"""Statements of these modules that concern more than one conversation, and why."""


def _statements(value: Any) -> Iterator[Statement]:
    if isinstance(value, Statement):
        yield value
    elif isinstance(value, dict):
        yield from _statements(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _statements(each)


def _cases() -> list[tuple[str, str]]:
    return [
        (name, variable)
        for name in REQUEST_PATH
        for variable, value in vars(importlib.import_module(f"server.postgres.{name}")).items()
        if any(_statements(value))
    ]


def _unrestricted(name: str, variable: str) -> list[str]:
    value = vars(importlib.import_module(f"server.postgres.{name}"))[variable]
    return [use for statement in _statements(value) for use in _check(statement.sql, statement.names)]


def _check(sql: str, names: tuple[str, ...] = ("conversation",)) -> list[str]:
    parameters = frozenset(number for number, name in enumerate(names, start=1) if name in PARAMETERS)
    return StatementCheck(KEYS, parameters).check(sql)


@pytest.mark.parametrize(("name", "variable"), _cases())
def test_a_statement_of_the_request_path_names_the_conversation_for_each_table(name: str, variable: str) -> None:
    if (name, variable) in EXEMPT:
        assert _unrestricted(name, variable), "needs no exemption any more"
    else:
        assert _unrestricted(name, variable) == []


def test_every_exemption_is_of_a_statement() -> None:
    assert EXEMPT.keys() <= set(_cases())


def test_every_table_belongs_to_a_conversation_or_is_known_not_to() -> None:
    outside_path = {
        "admin_sessions",
        "audit_log",
        "conversation_lengths",
        "index_progress",
        "login_failures",
        "provider_holds",
        "rate_windows",
        "replays",
        "saved_views",
    }
    tables = {table.name for table in metadata.sorted_tables}
    assert tables - KEYS.keys() - REFERENCE_TABLES.keys() - outside_path == set()
    assert REFERENCE_TABLES.keys() <= tables


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT FROM turns WHERE conversation_id = $1 AND seq = 2",
        "SELECT FROM turns t WHERE 1 = 1 AND ($1::uuid = t.conversation_id AND t.seq = 2)",
        "SELECT FROM conversations c LEFT JOIN turns t ON t.conversation_id = $1 WHERE c.id = $1",
        "WITH turns AS (SELECT FROM calls WHERE conversation_id = $1) SELECT FROM turns",
        "INSERT INTO turns (seq, conversation_id) SELECT 1, $1::uuid FROM conversations WHERE id = $1",
        "INSERT INTO turns (seq, conversation_id) VALUES (1, $1) ON CONFLICT DO NOTHING",
        "SELECT FROM assistants JOIN conversations c ON c.assistant_id = assistants.id WHERE c.id = $1",
        "UPDATE conversations SET epoch = 1 WHERE id = $1",
    ],
)
def test_a_restricted_statement_passes(sql: str) -> None:
    assert _check(sql) == []


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT FROM turns", ["turns"]),
        ("SELECT FROM turns WHERE conversation_id = $2", ["turns"]),
        ("SELECT FROM turns WHERE conversation_id = $1 OR seq = 2", ["turns"]),
        ("SELECT FROM turns WHERE NOT conversation_id = $1", ["turns"]),
        ("SELECT FROM turns WHERE conversation_id <> $1", ["turns"]),
        ("SELECT FROM turns WHERE conversation_id IN (SELECT $1)", ["turns"]),
        ("SELECT FROM conversations c JOIN turns t ON t.conversation_id = c.id WHERE c.id = $1", ["turns AS t"]),
        (
            "SELECT FROM conversations c LEFT JOIN turns t ON c.id = $1 AND t.conversation_id = $1",
            ["conversations AS c"],
        ),
        ("SELECT (SELECT 1 FROM turns WHERE conversation_id = c.id) FROM conversations c WHERE c.id = $1", ["turns"]),
        ("SELECT FROM conversations c, LATERAL (SELECT FROM turns WHERE seq = c.epoch) t WHERE c.id = $1", ["turns"]),
        ("SELECT ARRAY(SELECT seq FROM turns)", ["turns"]),
        ("SELECT CASE WHEN EXISTS (SELECT FROM turns) THEN 1 END", ["turns"]),
        ("SELECT 1 UNION ALL SELECT seq FROM turns", ["turns"]),
        ("WITH one AS (DELETE FROM call_chunks RETURNING 1) SELECT FROM one", ["call_chunks"]),
        ("WITH one AS (WITH two AS (SELECT FROM turns) SELECT FROM two) SELECT FROM one", ["turns"]),
        ("UPDATE conversations SET epoch = 1 FROM turns WHERE id = $1", ["turns"]),
        ("DELETE FROM calls USING turns WHERE calls.conversation_id = $1", ["turns"]),
        ("INSERT INTO turns (conversation_id) SELECT id FROM conversations WHERE id = $1", ["INSERT INTO turns"]),
        ("INSERT INTO turns (conversation_id) VALUES ($1), ($2)", ["INSERT INTO turns"]),
        ("INSERT INTO templates (hash) SELECT native FROM turns", ["turns"]),
    ],
)
def test_an_unrestricted_use_is_found_at_any_depth(sql: str, found: list[str]) -> None:
    assert _check(sql) == found
