"""The contract of the store port: every implementation of `server.conversation.store.Store` passes it."""

import pytest

from server.conversation.api_key import KeyRing, Tenant
from tests.contracts.store_accepting import AcceptContract, QueueContract
from tests.contracts.store_compaction import CompactionContract
from tests.contracts.store_conversations import AssistantContract, ConversationContract
from tests.contracts.store_forks import EraseContract, ForkContract
from tests.contracts.store_payloads import PayloadContract
from tests.contracts.store_running import LeaseContract, RunningTurnContract


@pytest.fixture
async def other_tenant(key_ring: KeyRing) -> Tenant:
    return await key_ring.create_tenant("other")


class StoreContract(
    AssistantContract,
    ConversationContract,
    AcceptContract,
    QueueContract,
    PayloadContract,
    RunningTurnContract,
    LeaseContract,
    ForkContract,
    EraseContract,
    CompactionContract,
):
    """The whole contract."""
