"""One chaos run: clients take turns, faults occur at random, everything comes to rest, and the checker examines the
result.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.chaos.checker import Findings, check
from tests.faults.chaos.client import WEATHER, Client
from tests.faults.chaos.deployment import LEASE_SECONDS, Deployment, open_deployment
from tests.faults.chaos.journal import Journal
from tests.faults.chaos.providers import open_chaos_providers
from tests.support.strata_process import strata

MODELS = {"gemini": "gemini-3.1-pro-preview", "anthropic": "claude-opus-5-5"}
_PROBES = 3
_SETTLE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is broken, and what. The seed determines the order, as far as the machine allows."""

    seed: int
    kills: int
    """The run ends when this many processes were killed."""
    seconds: float
    """Or after this time."""
    clients: int = 6
    conversations: int = 4
    """For each client."""
    servers: int = 3
    workers: int = 1
    pause_seconds: tuple[float, float] = (0.2, 1.0)
    """The pause between two faults."""
    fault_share: float = 0.12
    """Of the answers of the providers."""
    fuzz_share: float = 0.06
    weights: Mapping[str, float] | None = None
    """The frequency of each fault by its name; 0 leaves it out."""


WEIGHTS: Mapping[str, float] = {
    "kill_server": 60,
    "kill_worker": 10,
    "kill_database": 4,
    "fail_over": 2,
    "cut_database": 8,
    "swallow_database": 3,
    "cut_provider": 8,
    "swallow_provider": 2,
    "freeze": 4,
    "fill_disk": 1,
    "move_clock": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    findings: Findings
    kills: int
    turns: int
    unanswered: tuple[str, ...]
    """Conversations in which a last, plain task was not answered."""
    verified: str
    """The output of `strata replay verify` if it finds a problem, otherwise empty."""

    @property
    def is_clean(self) -> bool:
        return self.findings.is_clean and not self.unanswered and not self.verified

    def report(self) -> str:
        counts = f"kills: {self.kills}\nturns: {self.turns}\nunanswered: {len(self.unanswered)}"
        return f"{counts}\nreplay verify: {self.verified or 'no mismatch'}\n{self.findings.report()}"


async def run_chaos(
    plan: Plan,
    directory: Path,
    *,
    show: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Inject faults as planned, and check the result."""
    weights = WEIGHTS if plan.weights is None else plan.weights
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(closing(Journal(directory)))
        providers = await stack.enter_async_context(
            open_chaos_providers(
                journal,
                plan.seed,
                fault_share=plan.fault_share,
                fuzz_share=plan.fuzz_share,
                pause_seconds=0.03,
            )
        )
        deployment = await stack.enter_async_context(
            open_deployment(
                journal,
                providers,
                servers=plan.servers,
                workers=plan.workers,
                with_standby=weights.get("fail_over", 0) > 0,
            )
        )
        for missing in deployment.left_out:
            show(f"left out on this machine: {missing}")
        await _make_assistants(deployment)
        clients = [
            Client(f"c{number}", deployment, deployment.key, journal, plan.seed * 1000 + number)
            for number in range(plan.clients)
        ]
        running = [asyncio.create_task(client.run(deployment.assistants, plan.conversations)) for client in clients]
        await _break_things(plan, weights, deployment, show, clients)
        show("calm: everything is up again, and turns come to their ends")
        providers.calm()
        await deployment.calm()
        for client in clients:
            client.stop.set()
        await asyncio.gather(*running)
        unanswered = await _probe(clients)
        await _settle(deployment)
        findings = await check(directory, deployment.database_url, deployment.urls()[0], deployment.key)
        verified = await asyncio.to_thread(_verify, deployment.database_url, directory)
        for client in clients:
            await client.close()
        return Outcome(
            findings=findings,
            kills=deployment.kills,
            turns=sum(client.turns_ended for client in clients),
            unanswered=tuple(unanswered),
            verified=verified,
        )


async def _make_assistants(deployment: Deployment) -> None:
    maker = Client("maker", deployment, deployment.key, deployment.journal, 0)
    for provider, model in MODELS.items():
        settings: dict[str, Any] = {"max_output_tokens": 2048}
        body = {"name": provider, "provider": provider, "model": model, "tools": [WEATHER], "settings": settings}
        made = await maker.retry_write("POST", "/v1/assistants", body, 201)
        deployment.assistants[provider] = made["id"]
    await maker.close()


async def _break_things(
    plan: Plan,
    weights: Mapping[str, float],
    deployment: Deployment,
    show: Callable[[str], None],
    clients: list[Client],
) -> None:
    rng = random.Random(plan.seed)  # noqa: S311  reason: it only selects what to break
    names = [name for name, weight in weights.items() if weight > 0]
    # Each kind once, in a random order, before they are drawn: a short run has all of them too.
    first = rng.sample(names, len(names))
    ends_at = time.monotonic() + plan.seconds
    lasting: set[asyncio.Task[None]] = set()
    shown = 0
    while deployment.kills < plan.kills and time.monotonic() < ends_at:
        await asyncio.sleep(rng.uniform(*plan.pause_seconds))
        name = first.pop() if first else rng.choices(names, [weights[name] for name in names])[0]
        task = asyncio.create_task(_break(name, deployment, rng))
        if name in {"freeze", "swallow_database", "swallow_provider"}:
            lasting.add(task)
            task.add_done_callback(lasting.discard)
        else:
            await task
        if deployment.kills // 10 > shown:
            shown = deployment.kills // 10
            turns = sum(client.turns_ended for client in clients)
            show(f"{deployment.kills} of {plan.kills} kills, {turns} turns")
    await asyncio.gather(*lasting)


async def _break(name: str, deployment: Deployment, rng: random.Random) -> None:
    servers = [node for node in deployment.nodes if not node.works]
    workers = [node for node in deployment.nodes if node.works]
    server, wire = rng.choice(servers), rng.choice(deployment.wires)
    lease, brief = LEASE_SECONDS * rng.uniform(1.2, 2.5), rng.uniform(0.5, 3)
    faults: dict[str, Callable[[], Awaitable[None]]] = {
        "kill_server": lambda: deployment.kill(server),
        "kill_worker": lambda: deployment.kill(rng.choice(workers)),
        "kill_database": deployment.kill_database,
        "fail_over": deployment.fail_over,
        "cut_database": lambda: deployment.cut_database(rng.choice(deployment.nodes)),
        "swallow_database": lambda: deployment.swallow_database(server, lease),
        "cut_provider": lambda: deployment.cut_provider(wire),
        "swallow_provider": lambda: deployment.swallow_provider(wire, brief * 2),
        "freeze": lambda: deployment.freeze(server, lease),
        "fill_disk": lambda: deployment.fill_disk(brief),
        "move_clock": lambda: deployment.move_clock(rng),
    }
    await faults[name]()


async def _probe(clients: list[Client]) -> list[str]:
    """Send a last task to each conversation; pending tool calls are answered first."""
    unanswered = []
    for client in clients:
        for conversation in client.conversations:
            for _ in range(_PROBES):
                ended = await client.take_turn(conversation, plain=True)
                if ended is not None and ended["turn"]["state"] == "complete" and not conversation.pending:
                    break
            else:
                unanswered.append(conversation.id)
    return unanswered


def _verify(database_url: str, directory: Path) -> str:
    """The offline verification of every stored call, by the command that operators use."""
    done = strata("replay", "verify", env={"STRATA_DATABASE_URL": database_url, "STRATA_DATA_DIR": str(directory)})
    return "" if done.returncode == 0 else done.stdout + done.stderr


async def _settle(deployment: Deployment) -> None:
    """Wait until no turn runs and the leases of dead processes have expired."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    running = "SELECT count(*) FROM conversations WHERE lease_token IS NOT NULL"
    while await deployment.primary.fetch(running, "strata") and time.monotonic() < deadline:  # noqa: ASYNC110  reason: other processes
        await asyncio.sleep(0.2)
