"""What running replays takes, gathered once for a process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.compaction.typical_lengths import KnownLengths
from server.conversation.shutdown import Shutdown
from server.conversation.store import Store
from server.payload.shared_caches import StaticTextCache
from server.providers.provider import Provider
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.replay.rerun.assertions import AssertionChecker
from server.replay.rerun.compaction import CompactorOf
from server.replay.rerun.observer import ReplayObserver
from server.replay.rerun.port import Replays
from server.replay.rerun.renderer import RendererOf
from server.turns.stored import OpenFold


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTools:
    """The parts."""

    owner: str
    """What this process is called on the items that it runs."""
    replays: Replays
    store: Store
    """Where the sources are."""
    replay_store: Store
    renderer_of: RendererOf
    compactor_of: CompactorOf
    assertions: AssertionChecker
    lengths: KnownLengths
    """Of live conversations."""
    providers: Mapping[str, Provider]
    observer: ReplayObserver
    folds: Mapping[str, OpenFold]
    """By provider; of all providers, also of those that this process has no key for."""
    texts: StaticTextCache = field(default_factory=StaticTextCache)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    shutdown: Shutdown = field(default_factory=Shutdown)
    lease_seconds: float = 30.0
    """How long a process may be silent before another goes on with its items."""
