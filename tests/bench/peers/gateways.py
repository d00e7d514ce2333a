"""Other servers between clients and providers, as targets of load: SMG and the LiteLLM proxy."""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import asyncpg

from tests.bench.http_turn import Surroundings
from tests.bench.load import Answer, Client, TakeTurn, Target
from tests.bench.peers.environments import PeerUnavailable, install
from tests.bench.processes import Serving, open_place
from tests.bench.relay import check_answer
from tests.bench.upstream import OPENAI_MODEL, WORDS

_START_LIMIT_SECONDS = 120.0
AnyTarget = TypeVar("AnyTarget", bound=Target)
_HEADERS = {"authorization": f"Bearer sk-{secrets.token_hex(32)}"}
"""LiteLLM does not start without a strong master key; the others take any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmgTarget:
    """SMG: the Responses API with conversations stored in Postgres."""

    serving: Serving
    name: str = "smg"

    async def open_conversation(self, client: Client) -> TakeTurn:
        made = await client.post_json("/v1/conversations", {}, _HEADERS)

        async def take_turn(client: Client, text: str) -> Answer:
            body = {"model": OPENAI_MODEL, "input": text, "stream": True, "conversation": made["id"]}
            answer = await client.post("/v1/responses", body, _HEADERS, WORDS.encode())
            return check_answer(answer, b"response.completed")

        return take_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteLlmTarget:
    """The LiteLLM proxy: Anthropic's Messages API. It stores nothing, so a turn has only the new message."""

    serving: Serving
    name: str = "litellm"

    async def open_conversation(self, client: Client) -> TakeTurn:
        async def take_turn(client: Client, text: str) -> Answer:
            messages = [{"role": "user", "content": text}]
            body = {"model": "bench", "max_tokens": 1024, "stream": True, "messages": messages}
            return check_answer(await client.post("/v1/messages", body, _HEADERS, WORDS.encode()), b"message_stop")

        return take_turn


@asynccontextmanager
async def open_smg(around: Surroundings) -> AsyncIterator[SmgTarget]:
    program, port = install("smg") / "smg", _find_port()
    command = [str(program), "launch", "--host", "127.0.0.1", "--port", str(port), "--backend", "openai"]
    command += ["--worker-urls", around.upstream_url, "--disable-health-check", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(_find_port())]
    database_url = _rust_url(await create_database(around.database_url, "smg"))
    command += ["--history-backend", "postgres", "--postgres-db-url", database_url]
    async with _running(command, port, around, lambda serving: SmgTarget(serving=serving)) as target:
        yield target


@asynccontextmanager
async def open_litellm(around: Surroundings) -> AsyncIterator[LiteLlmTarget]:
    program, port = install("litellm") / "litellm", _find_port()
    parameters = {"model": "anthropic/claude-sonnet-4-5", "api_base": around.upstream_url, "api_key": "key"}
    with open_place() as place:
        file = place / "config.yaml"
        config = {
            "model_list": [{"model_name": "bench", "litellm_params": parameters}],
            "general_settings": {"master_key": _HEADERS["authorization"].removeprefix("Bearer ")},
        }
        # JSON is YAML.
        file.write_text(json.dumps(config))
        command = [str(program), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
        async with _running(
            [*command, "--num_workers", "1"], port, around, lambda serving: LiteLlmTarget(serving=serving)
        ) as target:
            yield target


@asynccontextmanager
async def _running(
    command: Sequence[str], port: int, around: Surroundings, build: Callable[[Serving], AnyTarget]
) -> AsyncIterator[AnyTarget]:
    """A program on the server's core, from its first answered turn until the block ends. Raises `PeerUnavailable`."""
    environment: Mapping[str, str] = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "NO_PROXY": "127.0.0.1",
    }
    cores = around.cores.server
    with open_place() as place:
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  reason: it is measured by its id, and nothing else runs yet
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,  # noqa: PLW1509  reason: this process has no other threads that matter to it
            )
        try:
            target = build(Serving(pid=process.pid, url=f"http://127.0.0.1:{port}"))
            await _await_turn(target, process, place / "log")
            yield target
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()


async def _await_turn(target: Target, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_SECONDS
    reason = "no answer"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            async with Client(target.serving.url) as client:
                await (await target.open_conversation(client))(client, "Are you there?")
        except (OSError, AssertionError, TimeoutError) as error:
            reason = str(error)[:300]
            await asyncio.sleep(0.5)
        else:
            return
    said = (await asyncio.to_thread(log.read_text, errors="replace")).strip().splitlines()[-1:]
    raise PeerUnavailable(f"does not take a turn: {reason} {' '.join(said)[:300]}")


async def create_database(url: str, name: str) -> str:
    """Create another database on the same server, for a peer whose tables have the names of Strata's; gives its URL."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rust_url(url: str) -> str:
    """The URL with the directory of the socket as its host."""
    parts = urlsplit(url)
    host = quote(parse_qs(parts.query)["host"][0], safe="")
    return f"postgresql://{parts.username}@{host}{parts.path}"
