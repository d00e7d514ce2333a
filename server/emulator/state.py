"""The state that the handlers of one emulator share."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from server.emulator.exchange import Exchange
from server.emulator.faults import FAULT_HEADER, ArmedFaults, parse_fault_header
from server.emulator.latency import FULL_SPEED, Latency
from server.emulator.reply import Fault, Turn
from server.emulator.request_log import RequestLog
from server.emulator.script import Script
from server.emulator.signing import Signer

Clock: TypeAlias = Callable[[], float]
"""Seconds since the Unix epoch. Tests pass a clock that they can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorState:
    signer: Signer
    script: Script
    latency: Latency
    clock: Clock
    request_log: RequestLog
    faults: ArmedFaults
    seed: int
    model_requests: Iterator[int] = field(default_factory=lambda: count(1))
    """The numbers of the requests that reach the model."""

    def take_fault(self, exchange: Exchange) -> Fault | None:
        """The fault that the request names in its header, else the next armed fault, if any. It is written to the
        log.
        """
        header = exchange.request.headers.get(FAULT_HEADER)
        fault = parse_fault_header(header) if header else self.faults.take()
        if fault is not None:
            exchange.fault = fault.kind
        return fault

    def next_turn(self, exchange: Exchange, *, prompt: str, after_tools: bool) -> Turn | None:
        """The scripted reply or fault for this request, or None if the reply is to be improvised.

        Call it once per request that reaches the model. A fault is written to the log.
        """
        turn = self.script.take(next(self.model_requests), prompt, after_tools=after_tools)
        if isinstance(turn, Fault):
            exchange.fault = turn.kind
        return turn


def build_state(
    *, script: Script | None = None, latency: Latency = FULL_SPEED, clock: Clock = time.time, seed: int = 0
) -> EmulatorState:
    """Build a new state. Signatures made with a seed are valid in every emulator with that seed, also after a
    restart.
    """
    return EmulatorState(
        signer=Signer(hashlib.sha256(f"emulator:{seed}".encode()).digest()),
        script=script or Script(()),
        latency=latency,
        clock=clock,
        request_log=RequestLog(),
        faults=ArmedFaults(),
        seed=seed,
    )
