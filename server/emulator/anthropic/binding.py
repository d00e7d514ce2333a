"""Which thinking blocks of a request are still valid.

The signature of a block records the model and account that made it, a hash of everything before it, and the previous
thinking block. The checks, in order: a signature that this emulator did not make is a 400 on every model. Inside a tool
loop the latest assistant message must contain the thinking it was returned with, unchanged. A block of another account,
or of a model that this model may not read, is left out silently. A block whose prefix has changed, or whose predecessor
is missing, is a 400, is dropped, or is only reported, depending on the model, the account and the request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.emulator.anthropic.caller import BINDING_CONTROLS, Caller
from server.emulator.anthropic.errors import Refused, invalid
from server.emulator.anthropic.models import MODELS, Model, PrefixCheck
from server.emulator.anthropic.prefix import Prefix, PrefixStart, hash_json, walk
from server.emulator.anthropic.prompt import PlacedBlock, find_open_tool_step
from server.emulator.anthropic.signatures import Claims, sign_claims, verify_claims
from server.emulator.signing import Signer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The result of the checks."""

    transformations: tuple[dict[str, str], ...]
    last_thinking_id: str
    """The last valid thinking block; empty if there is none."""
    dropped: frozenset[str]
    """Paths of the blocks that were dropped."""
    thinking_tokens: Mapping[str, int]
    """The input tokens of each block, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claimed:
    placed: PlacedBlock
    prefix: Prefix
    claims: Claims


def seal_thinking(  # noqa: PLR0913  reason: the signature records all of it
    signer: Signer,
    *,
    id_: str,
    model: Model,
    caller: Caller,
    opening: PrefixStart,
    prefix: Prefix,
    previous_id: str,
    text: str | None,
    tokens: int,
) -> str:
    """The signature of a new block. `text` is None if it is not displayed and so cannot be altered."""
    return sign_claims(
        signer,
        {
            "kind": "thinking",
            "id": id_,
            "model": model.id,
            "account": caller.organization_id,
            "prefix": prefix.digest if model.preserves_thinking else None,
            "system": opening.system,
            "tools": opening.tools,
            "previous": previous_id,
            "text": None if text is None else hash_json(text),
            "tokens": tokens,
        },
    )


def check_thinking(
    body: Mapping[str, Any],
    model: Model,
    caller: Caller,
    *,
    signer: Signer,
    opening: PrefixStart,
    start: Prefix,
    issued: Mapping[str, tuple[str, ...]],
) -> Bound:
    """Check all thinking blocks of the request. `issued`: the blocks that were returned with each tool call.

    Raises `Refused`.
    """
    step = find_open_tool_step(body["messages"])
    latest = {placed.path for placed in step.thinking} if step else set()
    blocks = [
        _Claimed(placed=placed, prefix=prefix, claims=_open(signer, placed, is_latest=placed.path in latest))
        for placed, prefix in walk(body["messages"], start)
        if placed.is_thinking
    ]
    if step is not None and blocks:
        _check_latest(step.thinking, step.tool_use_ids, blocks, issued, f"messages.{step.first}.content.0")
    check = _Check(model=model, caller=caller, opening=opening, behaviour=_behaviour(body, model, caller))
    for block in blocks:
        check.look_at(block)
    return Bound(
        transformations=tuple(check.transformations),
        last_thinking_id=check.last_id,
        dropped=frozenset(check.dropped),
        thinking_tokens={block.placed.path: int(block.claims["tokens"]) for block in blocks},
    )


def _open(signer: Signer, placed: PlacedBlock, *, is_latest: bool) -> Claims:
    block = placed.block
    claims = verify_claims(signer, block["signature"] if block["type"] == "thinking" else block["data"])
    if claims is None or claims["kind"] != "thinking":
        raise invalid(f"{placed.path}: {_complaint(placed)}")
    if block["type"] == "thinking" and claims["text"] not in {None, hash_json(block["thinking"])}:
        raise _modified(placed.path) if is_latest else invalid(f"{placed.path}: {_complaint(placed)}")
    return claims


def _check_latest(
    sent: Sequence[PlacedBlock],
    tool_use_ids: Sequence[str],
    blocks: Sequence[_Claimed],
    issued: Mapping[str, tuple[str, ...]],
    fallback_path: str,
) -> None:
    expected = next((issued[id_] for id_ in reversed(tool_use_ids) if id_ in issued), None)
    if expected is None:
        return  # not a call of this emulator: written by the client, or from before a restart
    claimed = {block.placed.path: block.claims["id"] for block in blocks}
    returned = tuple(claimed[placed.path] for placed in sent)
    if returned[-len(expected) :] == expected if expected else not returned:
        return
    moved = [placed.path for placed in sent if claimed[placed.path] not in expected] or [p.path for p in sent]
    raise _modified(moved[0] if moved else fallback_path)


def _modified(path: str) -> Refused:
    return invalid(
        f"{path}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These "
        "blocks must remain as they were in the original response."
    )


def _complaint(placed: PlacedBlock) -> str:
    field = "signature" if placed.block["type"] == "thinking" else "data"
    return f"Invalid `{field}` in `{placed.block['type']}` block"


def _behaviour(body: Mapping[str, Any], model: Model, caller: Caller) -> str:
    """`error`, `drop_block`, `report` or `allow`."""
    if model.prefix_check is PrefixCheck.NOBODY:
        return "allow"
    stated = (body.get("thinking", {}).get("block_binding") or {}).get("prefix_mismatch_behavior")
    if stated is not None:
        return str(stated)
    if model.prefix_check is PrefixCheck.NEW_ACCOUNTS and caller.is_old_account:
        return "report" if caller.has_beta(BINDING_CONTROLS) else "allow"
    return "error"


class _Check:
    """Checks the blocks in order along the chain. A block that was dropped for its prefix is not a predecessor."""

    def __init__(self, *, model: Model, caller: Caller, opening: PrefixStart, behaviour: str) -> None:
        self.last_id = ""
        self.transformations: list[dict[str, str]] = []
        self.dropped: set[str] = set()
        self._model = model
        self._caller = caller
        self._opening = opening
        self._behaviour = behaviour
        self._falling: PlacedBlock | None = None
        """The block that was dropped last; thinking directly after it is dropped too."""

    def look_at(self, block: _Claimed) -> None:
        unreadable = self._find_silent_reason(block)
        if unreadable is not None:
            self._drop(block, unreadable)
            self.last_id = block.claims["id"]
            return
        follows = self._falls_with_neighbour(block) or not self._holds(block)
        if not follows or self._behaviour == "allow":
            self.last_id = block.claims["id"]
            return
        if self._behaviour == "report":
            self._note("thinking_mismatch_allowed", block, "prefix_binding_mismatch")
            self.last_id = block.claims["id"]
            return
        if self._behaviour == "error":
            raise invalid(self._explain(block))
        self._drop(block, "prefix_binding_mismatch")
        self._falling = block.placed

    def _find_silent_reason(self, block: _Claimed) -> str | None:
        maker = MODELS[block.claims["model"]]
        if maker.binds_to_account and block.claims["account"] != self._caller.organization_id:
            return "organization_binding_mismatch"
        if maker.id != self._model.id and maker.id not in self._model.reads:
            return "model_binding_mismatch"
        return None

    def _holds(self, block: _Claimed) -> bool:
        recorded = block.claims["prefix"]
        if recorded is None:  # made by a model that records nothing
            return True
        return recorded == block.prefix.digest and (not self.last_id or block.claims["previous"] == self.last_id)

    def _falls_with_neighbour(self, block: _Claimed) -> bool:
        before = self._falling
        here = block.placed
        return before is not None and before.message == here.message and before.index + 1 == here.index

    def _drop(self, block: _Claimed, reason: str) -> None:
        self.dropped.add(block.placed.path)
        self._note("thinking_dropped", block, reason)

    def _note(self, kind: str, block: _Claimed, reason: str) -> None:
        self.transformations.append({"type": kind, "path": block.placed.path, "reason": reason})

    def _explain(self, block: _Claimed) -> str:
        text = (
            f"{block.placed.path}: {_complaint(block.placed)}. The block is bound to a different conversation. Remove "
            'the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
        )
        if not self._caller.has_beta(BINDING_CONTROLS):
            text += f" That setting requires the `{BINDING_CONTROLS}` value in the `anthropic-beta` header."
        return f"{text} {self._name_change(block)}"

    def _name_change(self, block: _Claimed) -> str:
        if block.claims["system"] != self._opening.system:
            return "The `system` prompt has changed since the block was created."
        if block.claims["tools"] != self._opening.tools:
            return "The `tools` have changed since the block was created."
        if block.claims["prefix"] != block.prefix.digest:
            return "The `messages` before the block have changed since it was created."
        return "A `thinking` block before it is missing or has moved."
