from server.replay.rerun.items import SourceLengths


class Lengths:
    """Known lengths by assistant."""

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        return {("tenant_a", "asst_live"): 7.0}.get((tenant_id, assistant_id))


async def test_a_replay_conversation_has_the_typical_length_of_the_recorded_assistant() -> None:
    lengths = SourceLengths(Lengths(), "asst_live")
    assert await lengths.load("tenant_a", "asst_of_the_replay") == 7.0
    assert await lengths.load("tenant_b", "asst_live") is None
