"""Replays on Postgres."""

from server.postgres.replay.erasure import ReplayErasure
from server.postgres.replay.items import LeasedItems
from server.postgres.replay.planning import ReplayPlanning
from server.postgres.replay.reports import ReplayReports
from server.postgres.replay.results import StoredResults
from server.postgres.replay.spending import CallReservations


class PostgresReplays(ReplayPlanning, LeasedItems, CallReservations, StoredResults, ReplayReports, ReplayErasure):
    """Implements `server.replay.rerun.port.Replays`, which documents the methods.

    A replay is one row. Each transaction that claims or ends an item, or makes a call, locks that row for a short time,
    so the limits hold over all processes. Replay conversations are written to schema `replay`: see `conversations`.
    """
