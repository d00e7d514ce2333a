from server.replay.rerun.compaction import SourceLengths


class Lengths:
    """What is known, by assistant."""

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        return {("tenant_a", "asst_live"): 7.0}.get((tenant_id, assistant_id))


async def test_a_shadow_is_taken_for_as_long_as_conversations_of_the_recorded_assistant_get() -> None:
    lengths = SourceLengths(Lengths(), "asst_live")
    assert await lengths.load("tenant_a", "asst_of_the_shadow") == 7.0
    assert await lengths.load("tenant_b", "asst_live") is None
