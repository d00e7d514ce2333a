"""Creation of replays: validated, estimated, stored and queued."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from server.conversation.audit import Actor
from server.conversation.errors import PriceUnknown, TemplateInvalid
from server.conversation.store import Store
from server.payload.renderer import Renderer
from server.replay.rerun.assertions import AssertionChecker
from server.replay.rerun.candidate import build_definition
from server.replay.rerun.payload import RendererOf
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import Candidate, Replay, ReplayDraft, ReplayEstimate, ReplayLimits
from server.replay.rerun.validation import check_draft, check_size, refuse

QueueReplay: TypeAlias = Callable[[str, str, int], Awaitable[None]]
"""Queues a replay, given its tenant, its id, and how many of its items may run at the same time.

A replay that is already queued is not queued twice. Without this, workers find the replay some seconds later. Raises
`DatabaseUnavailable`."""
_MAX_CHECKED: Final = 50
"""Conversations whose assistants are checked with the candidate in advance. Others are checked when they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The conversations and the estimate of a replay."""

    conversation_ids: Sequence[str]
    estimate: ReplayEstimate


class ReplayService:
    """Plans, creates and continues replays. `replays` does everything else."""

    def __init__(
        self,
        replays: Replays,
        store: Store,
        queue: QueueReplay,
        renderer_of: RendererOf,
        assertions: AssertionChecker,
    ) -> None:
        self.replays = replays
        self._store = store
        self._queue = queue
        self._renderer_of = renderer_of
        self._assertions = assertions

    async def plan(self, tenant_id: str, draft: ReplayDraft) -> ReplayPlan:
        """Validate and estimate a replay. Nothing is written, and no provider is called.

        Raises `ValidationFailed` with the field of a draft that cannot be run, `ConversationNotFound`,
        `AssistantNotFound`, `TemplateWorkersBusy`, and `PriceUnknown` if the budget is in dollars and a model has no
        price.
        """
        check_draft(draft)
        await self._assertions.read(tenant_id, draft.assertions)
        renderer = self._renderer_of(draft.candidate.templates)
        await renderer.check_templates(tenant_id)
        ids = await self.replays.select_conversations(tenant_id, draft.selection)
        check_size(len(ids), draft.limits)
        await self._check_candidate(tenant_id, draft.candidate, ids[:_MAX_CHECKED], renderer)
        estimate = await self.replays.estimate(tenant_id, draft, ids)
        if draft.limits.budget_usd is not None and estimate.unpriced_count:
            # Otherwise each item would fail by itself, some after their first calls were charged.
            raise PriceUnknown
        return ReplayPlan(conversation_ids=ids, estimate=estimate)

    async def create(self, tenant_id: str, draft: ReplayDraft, *, actor: Actor) -> Replay:
        """Create a running replay. Raises what `plan` raises."""
        plan = await self.plan(tenant_id, draft)
        draft = replace(draft, candidate=await self._pin(tenant_id, draft.candidate))
        replay = await self.replays.create_replay(tenant_id, draft, plan.conversation_ids, actor=actor)
        await self._queue(tenant_id, replay.id, _slots_of(replay))
        return replay

    async def continue_(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, limits: ReplayLimits | None = None
    ) -> Replay:
        """Continue a replay and queue it. Raises what `Replays.continue_replay` raises."""
        replay = await self.replays.continue_replay(tenant_id, replay_id, actor=actor, limits=limits)
        await self._queue(replay.tenant_id, replay.id, _slots_of(replay))
        return replay

    async def _pin(self, tenant_id: str, candidate: Candidate) -> Candidate:
        """Fix the newest version of the assistant, so that all items use the same one."""
        if candidate.assistant_id is None or candidate.assistant_version is not None:
            return candidate
        newest = await self._store.load_assistant(tenant_id, candidate.assistant_id)
        return replace(candidate, assistant_version=newest.version)

    async def _check_candidate(
        self, tenant_id: str, candidate: Candidate, conversation_ids: Sequence[str], renderer: Renderer
    ) -> None:
        """Check the candidate with each assistant of the conversations, because their models differ."""
        seen: set[tuple[str, int | None]] = set()
        for conversation_id in conversation_ids:
            conversation = await self._store.load_conversation(tenant_id, conversation_id)
            assistant_id, version = candidate.assistant_id, candidate.assistant_version
            if assistant_id is None:
                assistant_id, version = conversation.assistant_id, version or conversation.assistant_version
            if (assistant_id, version) in seen:
                continue
            seen.add((assistant_id, version))
            assistant = await self._store.load_assistant(tenant_id, assistant_id, version)
            definition = build_definition(assistant.definition, candidate)
            if candidate.instructions is not None and len(seen) == 1:
                try:
                    await renderer.check_instructions(tenant_id, definition)
                except TemplateInvalid as error:
                    refuse([("candidate.instructions", error.message)])


def _slots_of(replay: Replay) -> int:
    return min(replay.draft.limits.parallelism, replay.item_count)
