"""Where each table of a conversation goes on a Citus cluster."""

from server.postgres.distribution import REFERENCE_TABLES, list_local_tables, plan_distribution
from server.postgres.schema import metadata
from tests.unit.postgres.test_conversation_restriction import KEYS
from tests.unit.postgres.test_conversation_restriction import REFERENCE_TABLES as SHARED_TABLES

REPLAYS = {"replay_items", "replay_results"}


def test_every_table_has_one_place() -> None:
    planned = [step.table for step in plan_distribution()]
    assert sorted([*planned, *list_local_tables()]) == sorted(
        table.name for table in metadata.sorted_tables if table.schema is None
    )


def test_the_tables_that_the_request_path_restricts_are_distributed_and_those_that_it_shares_are_copied() -> None:
    planned = {step.table for step in plan_distribution()}
    assert planned - set(REFERENCE_TABLES) == KEYS.keys() - REPLAYS
    assert set(REFERENCE_TABLES) == SHARED_TABLES.keys()
    assert set(list_local_tables()) >= REPLAYS


def test_a_table_comes_after_those_that_its_foreign_keys_name() -> None:
    order = [step.table for step in plan_distribution()]
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            if table.name in order and table.schema is None:
                assert order.index(key.column.table.name) < order.index(table.name)


def test_tables_of_conversations_are_on_the_node_of_the_conversation() -> None:
    statements = {step.table: step.sql for step in plan_distribution()}
    assert (
        statements["conversations"] == "SELECT create_distributed_table('conversations', 'id', colocate_with => 'none')"
    )
    assert statements["turns"] == (
        "SELECT create_distributed_table('turns', 'conversation_id', colocate_with => 'conversations')"
    )
