"""The store on Postgres passes the contract of the port."""

from server.conversation.store import Store
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.contracts.store_contract import StoreContract, other_tenant

__all__ = ["other_tenant"]


def test_the_store_implements_the_port(database: Database) -> None:
    store: Store = PostgresStore(database)
    assert isinstance(store, PostgresStore)


class TestPostgresStore(StoreContract):
    """See the contract."""
