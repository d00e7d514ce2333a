"""What running replays takes, gathered once for a process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.conversation_lengths import KnownLengths
from server.held_texts import HeldTexts
from server.provider import Provider
from server.replay_assertions import AssertionChecker
from server.replay_compaction import CompactorOf
from server.replay_observer import ReplayObserver
from server.replay_renderer import RendererOf
from server.replays import Replays
from server.retry_policy import RetryPolicy
from server.stop_sign import StopSign
from server.store import Store
from server.token_estimate import TokenEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTools:
    """The parts."""

    owner: str
    """What this process is called on the items that it runs."""
    replays: Replays
    store: Store
    """Where the sources are."""
    shadows: Store
    renderer_of: RendererOf
    compactor_of: CompactorOf
    assertions: AssertionChecker
    lengths: KnownLengths
    """Of live conversations."""
    providers: Mapping[str, Provider]
    observer: ReplayObserver
    texts: HeldTexts = field(default_factory=HeldTexts)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    stop_sign: StopSign = field(default_factory=StopSign)
    lease_seconds: float = 30.0
    """How long a process may be silent before another goes on with its items."""
