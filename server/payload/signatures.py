"""Which answers go back to a provider without their signatures, and why.

A signature is worth something only to who made it: the same provider, the same family of models, on some models the
same account, and on some the same text before it. Elsewhere it is refused or makes the request fail, so it is withheld.
It is not lost: the stored answer keeps it, and whenever the conversation returns to where it holds, it is sent again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from server.conversation.block import ToolCallBlock
from server.conversation.epoch import NOTHING_REJECTED, Epoch, Rejected
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind
from server.providers.model_profile import ModelProfile, find_family


class WithheldReason(StrEnum):
    """Why signatures of an answer are not sent."""

    PROVIDER = "provider"
    """Another vendor made it."""
    FAMILY = "family"
    """A model made it whose signatures this one does not read."""
    ACCOUNT = "account"
    """It was made with other credentials."""
    PREFIX = "prefix"
    """It was made behind another static text or other tools, or behind a signed block that is no longer sent."""
    REJECTED = "rejected"
    """The provider has rejected signatures of the history, and this answer was among it."""
    UNSIGNED = "unsigned"
    """Its first call came without one, where the model insists on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureScope:
    """Who is asked, and behind what."""

    provider: str
    account: str
    profile: ModelProfile
    prefix_hash: bytes
    kept_prefix_hashes: tuple[bytes, ...] = ()
    """Of an epoch with a signed summary: where it comes from, see `server.conversation.epoch`."""
    rejected: Rejected = NOTHING_REJECTED
    """By this provider."""

    def is_behind(self, prefix_hash: bytes | None) -> bool:
        """Whether what was made behind this prefix was made behind the present one, or one that it stands for."""
        return prefix_hash is not None and prefix_hash in {self.prefix_hash, *self.kept_prefix_hashes}


def build_signature_scope(provider: str, account: str, profile: ModelProfile, epoch: Epoch) -> SignatureScope:
    """Who is asked in an epoch."""
    return SignatureScope(
        provider=provider,
        account=account,
        profile=profile,
        prefix_hash=epoch.prefix_hash,
        kept_prefix_hashes=() if epoch.signed_summary is None else epoch.signed_summary.kept_prefix_hashes,
        rejected=epoch.rejected.get(provider, NOTHING_REJECTED),
    )


def find_withheld(turns: Sequence[BufferedTurn], scope: SignatureScope) -> Mapping[int, WithheldReason]:
    """By their numbers the answers whose signatures do not hold for this signer."""
    answers = [turn for turn in turns if turn.kind is TurnKind.MODEL_RESPONSE]
    family = _find_family_asked(answers, scope)
    withheld = {turn.seq: reason for turn in answers if (reason := _find_reason(turn, scope, family)) is not None}
    if not scope.profile.prefix_bound:
        return withheld
    crossing = _find_crossing(answers, withheld, scope)
    early = {turn.seq: WithheldReason.PREFIX for turn in answers if turn.seq <= crossing and turn.seq not in withheld}
    return withheld | early


def _find_family_asked(answers: Sequence[BufferedTurn], scope: SignatureScope) -> str:
    """The family of the model that is asked: what its newest answer said, where the name is an alias."""
    for turn in reversed(answers):
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
    if profile.prefix_bound and not scope.is_behind(turn.prefix_hash):
        return WithheldReason.PREFIX
    calls = [block for block in turn.blocks or () if isinstance(block, ToolCallBlock)]
    if profile.signs_calls and calls and calls[0].signature is None:
        return WithheldReason.UNSIGNED
    return None


def _find_crossing(
    answers: Sequence[BufferedTurn], withheld: Mapping[int, WithheldReason], scope: SignatureScope
) -> int:
    """The last answer with calls that was made behind another prefix, but whose results went out behind this one.

    Claude wants the thinking that belongs to the calls it is given results for, or none at all. So everything up to
    there went out without thinking; and since what was left out once must not come back, it stays so.
    """
    said = [turn for turn in answers if turn.native.data]
    crossings = [
        turn.seq
        for turn, following in zip(said, [*said[1:], None], strict=False)
        if withheld.get(turn.seq) is WithheldReason.PREFIX
        and any(isinstance(block, ToolCallBlock) for block in turn.blocks or ())
        and (following is None or scope.is_behind(following.prefix_hash))
    ]
    return max(crossings, default=0)


def note_withheld(reasons: Mapping[int, WithheldReason]) -> Iterator[dict[str, object]]:
    """What a call records of it: for each reason the turns."""
    for reason in WithheldReason:
        if seqs := sorted(seq for seq, found in reasons.items() if found is reason):
            yield {"kind": "signatures_withheld", "reason": str(reason), "seqs": seqs}
