"""The store on Postgres keeps the port's contract."""

from server.conversation.store import Store
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.contracts.store_contract import StoreContract, other_tenant

__all__ = ["other_tenant"]


def test_the_store_is_what_the_port_asks_for(database: Database) -> None:
    store: Store = PostgresStore(database)
    assert isinstance(store, PostgresStore)


class TestPostgresStore(StoreContract):
    """See the contract."""
