"""The rules of a history, and the repair of a history that breaks them.

Providers accept a history only if

- a tool call is immediately followed by its results: `call_unanswered`
- a result answers a call of the model response directly before it: `result_orphaned`
- a call has one result: `result_repeated`
- no two calls have the same id: `call_repeated`
- a model response follows tool results: `result_passed_over`
- a model response follows an input: `answer_unasked`

Input is checked before it is stored, so a stored history is broken only by a crash, a cancelled turn, abandoned calls
or an import. It is repaired whenever a payload is built. The stored turns do not change, and every repair is recorded
with the call.

The repair keeps as much as possible. No user task is dropped: one that follows unanswered results is sent together with
them. A call without a result gets one that says that the call was abandoned. A result without a call is dropped. A call
whose id is taken gets another one.

The repair is a function of the turns alone, and looks ahead no further than the input after a model response. So a turn
is repaired in the same way in every later request, whatever follows it: caches and signatures depend on that. It can
also continue after an earlier part of the history (`RepairState`), with the same result as for the whole.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from server.conversation.block import JsonValue, ToolCallBlock, ToolResultBlock
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind, TurnState

NO_RESULT: Final = "No result: the call was abandoned."

Repair: TypeAlias = dict[str, JsonValue]
"""As stored with the call: `kind`, the `seq` of the turn, and the `ids` of calls, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The parts of a turn that the rules apply to."""

    kind: TurnKind
    seq: int | None
    """None if a repair inserted it."""
    calls: tuple[ToolCallBlock, ...] = ()
    results: tuple[ToolResultBlock, ...] = ()
    complete: bool = True
    joined: bool = False
    """A user task that is sent together with the results before it, as one input."""
    renamed: bool = False
    """Some of the calls have another id than the model gave them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that the history breaks, and where."""

    rule: str
    seq: int | None
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairState:
    """What the repair of the following steps depends on."""

    last_kind: TurnKind | None = None
    """The kind of the last step; None before the first."""
    call_ids: frozenset[str] = frozenset()
    """All ids of calls so far."""


START: Final = RepairState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """A history that breaks no rule, and the repairs."""

    steps: tuple[Step, ...]
    repairs: tuple[Repair, ...]
    state: RepairState
    """After the last step."""


def read_steps(turns: Sequence[BufferedTurn]) -> tuple[Step, ...]:
    """Convert turns to steps. Model responses of which nothing can be sent have to be left out before."""
    return tuple(
        Step(
            kind=turn.kind,
            seq=turn.seq,
            calls=tuple(block for block in turn.blocks or () if isinstance(block, ToolCallBlock)),
            results=tuple(block for block in turn.blocks or () if isinstance(block, ToolResultBlock)),
            complete=turn.state is TurnState.COMPLETE,
        )
        for turn in turns
    )


def find_broken_rules(steps: Sequence[Step]) -> list[BrokenRule]:
    """Return every place where the history breaks a rule; empty if it can be sent."""
    broken: list[BrokenRule] = []
    seen: set[str] = set()
    before: Step | None = None
    for step, after in zip(steps, [*steps[1:], None], strict=False):
        for rule, ids in (
            ("call_repeated", _repeated(_call_ids(step), seen)),
            ("result_repeated", _repeated(_result_ids(step), set())),
            ("result_orphaned", _missing(_result_ids(step), _call_ids(before))),
            ("call_unanswered", _missing(_call_ids(step), _result_ids(after))),
        ):
            if ids:
                broken.append(BrokenRule(rule=rule, seq=step.seq, ids=ids))
        if order_rule := _find_broken_order(step, before):
            broken.append(BrokenRule(rule=order_rule, seq=step.seq))
        before = step
    return broken


def repair(steps: Sequence[Step], before: RepairState = START, next_kind: TurnKind | None = None) -> Repaired:
    """Repair a history, or the part of it after `before`. A history that breaks no rule is returned unchanged.

    `next_kind` is the kind of the step that follows; None if none does. It must not be a tool response.
    """
    repairer = _Repairer(before)
    index = 0
    while index < len(steps):
        step = steps[index]
        index += 1
        match step.kind:
            case TurnKind.USER_TASK:
                repairer.add_task(step)
            case TurnKind.TOOL_RESPONSE:
                repairer.drop_orphans(step, step.results)
            case TurnKind.MODEL_RESPONSE:
                responses = _responses_at(steps, index) if step.calls else ()
                index += len(responses)
                follower = steps[index].kind if index < len(steps) else next_kind
                repairer.add_answer(step, responses, None if responses else follower)
    return Repaired(steps=tuple(repairer.steps), repairs=tuple(repairer.repairs), state=repairer.state)


class _Repairer:
    """A repair in progress."""

    def __init__(self, before: RepairState) -> None:
        self.steps: list[Step] = []
        self.repairs: list[Repair] = []
        self._before = before
        self._new_ids: set[str] = set()

    @property
    def state(self) -> RepairState:
        known = self._before.call_ids
        return RepairState(last_kind=self._last_kind, call_ids=known | self._new_ids if self._new_ids else known)

    @property
    def _last_kind(self) -> TurnKind | None:
        return self.steps[-1].kind if self.steps else self._before.last_kind

    def add_task(self, task: Step) -> None:
        """Add a task. After results that no model response followed, it is sent together with them."""
        if self._last_kind is TurnKind.TOOL_RESPONSE and not task.joined:
            self._note("task_joined", task.seq)
            task = replace(task, joined=True)
        self.steps.append(task)

    def add_answer(self, answer: Step, responses: Sequence[Step], follower: TurnKind | None) -> None:
        """Add a model response and its results, including supplied ones."""
        if self._last_kind in {None, TurnKind.MODEL_RESPONSE}:
            self._note("task_supplied", answer.seq)
            self.steps.append(Step(kind=TurnKind.USER_TASK, seq=None))
        renamed = self._rename(answer)
        self.steps.append(renamed)
        if not answer.calls:
            return
        found = self._match(answer, responses)
        missing = [call.id for call, result in zip(renamed.calls, found, strict=True) if result is None]
        if missing:
            given_up = answer.complete and follower is TurnKind.USER_TASK
            self._note("call_abandoned" if given_up else "result_supplied", answer.seq, ids=missing)
        results = tuple(
            ToolResultBlock(tool_call_id=call.id, output=NO_RESULT, is_error=True)
            if result is None
            else replace(result, tool_call_id=call.id)
            for call, result in zip(renamed.calls, found, strict=True)
        )
        seq = responses[-1].seq if responses else None
        self.steps.append(Step(kind=TurnKind.TOOL_RESPONSE, seq=seq, results=results))

    def drop_orphans(self, response: Step, orphans: Sequence[ToolResultBlock]) -> None:
        """Drop results of no pending call. An empty response is dropped too."""
        self._note("orphan_result_dropped", response.seq, ids=[result.tool_call_id for result in orphans])

    def _match(self, answer: Step, responses: Sequence[Step]) -> list[ToolResultBlock | None]:
        """Find the result of each call. The first of several results counts; two calls with one id take
        them in turn.
        """
        found: list[ToolResultBlock | None] = [None] * len(answer.calls)
        ids = _call_ids(answer)
        for response in responses:
            orphans = [result for result in response.results if result.tool_call_id not in ids]
            if orphans:
                self.drop_orphans(response, orphans)
            repeated = []
            for result in response.results:
                free_indexes = (
                    index for index, id_ in enumerate(ids) if id_ == result.tool_call_id and found[index] is None
                )
                index = next(free_indexes, None)
                if index is not None:
                    found[index] = result
                elif result.tool_call_id in ids:
                    repeated.append(result.tool_call_id)
            if repeated:
                self._note("repeated_result_dropped", response.seq, ids=repeated)
        return found

    def _rename(self, answer: Step) -> Step:
        """Give a call whose id is taken another one. It is derived from the call's position, so it is
        always the same.
        """
        calls: list[ToolCallBlock] = []
        for index, call in enumerate(answer.calls):
            named = call
            if call.id in self._before.call_ids or call.id in self._new_ids:
                written = f"{answer.seq}:{index}:{call.id}".encode("utf-8", "surrogatepass")
                named = replace(call, id=f"call_{hashlib.sha256(written).hexdigest()[:32]}", is_id_ours=False)
            self._new_ids.add(named.id)
            calls.append(named)
        pairs = [(old.id, new.id) for old, new in zip(answer.calls, calls, strict=True) if old.id != new.id]
        if not pairs:
            return answer
        self._note("call_renamed", answer.seq, ids=[old for old, _ in pairs], renamed=[new for _, new in pairs])
        return replace(answer, calls=tuple(calls), renamed=True)

    def _note(self, kind: str, seq: int | None, ids: Sequence[str] = (), **more: JsonValue) -> None:
        self.repairs.append({"kind": kind, "seq": seq, "ids": list(ids), **more})


def _responses_at(steps: Sequence[Step], index: int) -> tuple[Step, ...]:
    """The consecutive tool responses from there; an import may contain them one by one."""
    end = index
    while end < len(steps) and steps[end].kind is TurnKind.TOOL_RESPONSE:
        end += 1
    return tuple(steps[index:end])


def _find_broken_order(step: Step, before: Step | None) -> str | None:
    before_kind = None if before is None else before.kind
    match step.kind:
        case TurnKind.MODEL_RESPONSE if before_kind in {None, TurnKind.MODEL_RESPONSE}:
            return "answer_unasked"
        case TurnKind.USER_TASK if before_kind is TurnKind.TOOL_RESPONSE and not step.joined:
            return "result_passed_over"
        case TurnKind.TOOL_RESPONSE if not step.results:
            return "result_orphaned"
        case _:
            return None


def _call_ids(step: Step | None) -> tuple[str, ...]:
    return () if step is None else tuple(call.id for call in step.calls)


def _result_ids(step: Step | None) -> tuple[str, ...]:
    return () if step is None else tuple(result.tool_call_id for result in step.results)


def _missing(wanted: Sequence[str], there: Sequence[str]) -> tuple[str, ...]:
    return tuple(id_ for id_ in wanted if id_ not in there)


def _repeated(ids: Sequence[str], seen: set[str]) -> tuple[str, ...]:
    """Return the ids that were seen before, and add all to `seen`."""
    repeated = []
    for id_ in ids:
        if id_ in seen:
            repeated.append(id_)
        seen.add(id_)
    return tuple(repeated)
