"""Which model responses are sent back without their signatures, and why.

A signature is valid only for the provider and model family that created it, on some models only for the same account,
and on some only after the same prefix. Anywhere else it is ignored or makes the request fail, so it is withheld. The
stored response keeps it, and it is sent again when the conversation returns to where it is valid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.conversation.block import ToolCallBlock
from server.conversation.epoch import NOTHING_REJECTED, Epoch, Rejected
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind
from server.providers.model_profile import ModelProfile, find_family


class WithheldReason(StrEnum):
    """Why the signatures of a response are not sent."""

    PROVIDER = "provider"
    """Another vendor created it."""
    FAMILY = "family"
    """A model created it whose signatures this model does not accept."""
    ACCOUNT = "account"
    """It was created with other credentials."""
    PREFIX = "prefix"
    """It was created with another static text or other tools, or after a signed summary that is no longer sent."""
    REJECTED = "rejected"
    """The provider has rejected signatures of the history, and this response was part of it."""
    UNSIGNED = "unsigned"
    """Its first call has no signature, and the model requires one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureScope:
    """Where signatures have to be valid: the provider, account, model and prefix of a request."""

    provider: str
    account: str
    profile: ModelProfile
    prefix_hash: bytes
    kept_prefix_hashes: tuple[bytes, ...] = ()
    """With a signed summary: the prefixes whose thinking stays valid, see `server.conversation.epoch`."""
    rejected: Rejected = NOTHING_REJECTED
    """What this provider has rejected."""

    def has_prefix(self, prefix_hash: bytes | None) -> bool:
        """Return whether thinking created with this prefix is valid for the present one."""
        return prefix_hash is not None and prefix_hash in {self.prefix_hash, *self.kept_prefix_hashes}


def build_signature_scope(provider: str, account: str, profile: ModelProfile, epoch: Epoch) -> SignatureScope:
    """Return the scope of requests in an epoch."""
    return SignatureScope(
        provider=provider,
        account=account,
        profile=profile,
        prefix_hash=epoch.prefix_hash,
        kept_prefix_hashes=() if epoch.signed_summary is None else epoch.signed_summary.kept_prefix_hashes,
        rejected=epoch.rejected.get(provider, NOTHING_REJECTED),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """The responses whose signatures are not valid in a scope, by number."""

    reasons: Mapping[int, WithheldReason]
    crossings: tuple[int, ...] = ()
    """See `_find_crossings`."""
    last_answered: BufferedTurn | None = None
    """The last response that has content. Whether it is a crossing depends on the turns after it."""


NOTHING_WITHHELD: Final = Withheld(reasons={})


def find_withheld(
    turns: Sequence[BufferedTurn], scope: SignatureScope, family: str, before: Withheld = NOTHING_WITHHELD
) -> Withheld:
    """Return the responses whose signatures are not valid in this scope, of `turns` and of those `before` them.

    If the last of the `crossings` differs from that of `before`, the result for the earlier turns is no longer right,
    and has to be determined again with all turns.
    """
    answers = [turn for turn in turns if turn.kind is TurnKind.MODEL_RESPONSE]
    found = {turn.seq: reason for turn in answers if (reason := _find_reason(turn, scope, family)) is not None}
    reasons = {**before.reasons, **found} if found else before.reasons
    answered = [turn for turn in answers if turn.native.data]
    last = answered[-1] if answered else before.last_answered
    if not scope.profile.prefix_bound:
        return Withheld(reasons=reasons, last_answered=last)
    crossings = before.crossings
    if before.last_answered is not None:
        answered.insert(0, before.last_answered)
        crossings = tuple(seq for seq in crossings if seq < before.last_answered.seq)
    crossings = (*crossings, *_find_crossings(answered, reasons, scope))
    limit = crossings[-1] if crossings else 0
    early = {turn.seq: WithheldReason.PREFIX for turn in answers if turn.seq <= limit and turn.seq not in reasons}
    return Withheld(reasons={**reasons, **early} if early else reasons, crossings=crossings, last_answered=last)


def find_current_family(turns: Sequence[BufferedTurn], scope: SignatureScope) -> str:
    """Return the family of the requested model. If its name is an alias, its newest response names the model."""
    for turn in reversed(turns):
        if turn.native.dialect == scope.provider and turn.model == scope.profile.model and turn.model_version:
            return find_family(scope.provider, turn.model, turn.model_version)
    return scope.profile.family


def _find_reason(turn: BufferedTurn, scope: SignatureScope, family: str) -> WithheldReason | None:
    profile = scope.profile
    if turn.native.dialect != scope.provider:
        return WithheldReason.PROVIDER
    if turn.seq <= scope.rejected.signatures_through_seq:
        return WithheldReason.REJECTED
    if turn.model is None or find_family(scope.provider, turn.model, turn.model_version) != family:
        return WithheldReason.FAMILY
    if profile.account_bound and turn.account != scope.account:
        return WithheldReason.ACCOUNT
    if profile.prefix_bound and not scope.has_prefix(turn.prefix_hash):
        return WithheldReason.PREFIX
    calls = [block for block in turn.blocks or () if isinstance(block, ToolCallBlock)]
    if profile.signs_calls and calls and calls[0].signature is None:
        return WithheldReason.UNSIGNED
    return None


def _find_crossings(
    answered: Sequence[BufferedTurn], withheld: Mapping[int, WithheldReason], scope: SignatureScope
) -> tuple[int, ...]:
    """Return the responses with calls that were created with another prefix, but whose results were sent with this one.

    Claude requires either the thinking that belongs to the calls whose results it is given, or no thinking at all. So
    everything up to the last such response was sent without thinking. Thinking that was left out once must not be sent
    again, so it stays left out.
    """
    return tuple(
        turn.seq
        for turn, following in zip(answered, [*answered[1:], None], strict=False)
        if withheld.get(turn.seq) is WithheldReason.PREFIX
        and any(isinstance(block, ToolCallBlock) for block in turn.blocks or ())
        and (following is None or scope.has_prefix(following.prefix_hash))
    )


def record_withheld(reasons: Mapping[int, WithheldReason]) -> Iterator[dict[str, object]]:
    """Yield a warning for each reason, with the turns."""
    for reason in WithheldReason:
        if seqs := sorted(seq for seq, found in reasons.items() if found is reason):
            yield {"kind": "signatures_withheld", "reason": str(reason), "seqs": seqs}
