"""The store step of other libraries: rebuild the context for the next call, then append the turn.

It runs in the virtual environment of the library, so it imports nothing of this repository. It reads commands from its
input, one JSON document per line, and answers each with one: `prepare` fills new conversations, `run` takes steps on
them with as many clients as there are conversations.

    python library_steps.py LIBRARY DATABASE_URL CORE,...
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, PLC0415, T201
# The libraries are not installed where this repository is checked, and only one of them where this runs.

import asyncio
import json
import os
import sys
import time
import uuid
from urllib.parse import parse_qs, urlsplit

ASKED, REPLIED = "x" * 200, "y" * 800


class RawAsyncpg:
    """The floor: one query for the last 20 turns, and an insert for each turn."""

    async def open(self, url):
        import asyncpg

        self.pool = await asyncpg.create_pool(url, min_size=1, max_size=20)
        await self.pool.execute("CREATE TABLE raw_turns (id uuid, seq bigserial, text text, PRIMARY KEY (id, seq))")

    async def fill(self, turns):
        key = uuid.uuid4()
        texts = [(key, REPLIED if number % 2 else ASKED) for number in range(turns)]
        await self.pool.executemany("INSERT INTO raw_turns (id, text) VALUES ($1, $2)", texts)
        return key

    async def step(self, key):
        query = "SELECT text FROM raw_turns WHERE id = $1 ORDER BY seq DESC LIMIT 20"
        await self.pool.fetch(query, key)
        for text in (ASKED, REPLIED):
            await self.pool.execute("INSERT INTO raw_turns (id, text) VALUES ($1, $2)", key, text)


class OpenAIAgents:
    """SQLAlchemySession."""

    async def open(self, url):
        from sqlalchemy.ext.asyncio import create_async_engine

        self.engine = create_async_engine(sqlalchemy_url(url), pool_size=20)

    def session(self, key):
        from agents.extensions.memory import SQLAlchemySession

        return SQLAlchemySession(key, engine=self.engine, create_tables=True)

    async def fill(self, turns):
        key = str(uuid.uuid4())
        await self.session(key).add_items([item for _ in range(turns // 2) for item in self.items()])
        return self.session(key)

    async def step(self, session):
        await session.get_items()
        await session.add_items(self.items())

    def items(self):
        return [{"role": "user", "content": ASKED}, {"role": "assistant", "content": REPLIED}]


class GoogleAdk:
    """DatabaseSessionService."""

    async def open(self, url):
        from google.adk.sessions import DatabaseSessionService

        self.service = DatabaseSessionService(sqlalchemy_url(url))

    async def fill(self, turns):
        session = await self.service.create_session(app_name="bench", user_id="bench")
        for number in range(turns):
            await self.service.append_event(session, self.event(is_answer=bool(number % 2)))
        return session.id

    async def step(self, key):
        session = await self.service.get_session(app_name="bench", user_id="bench", session_id=key)
        await self.service.append_event(session, self.event(is_answer=False))
        await self.service.append_event(session, self.event(is_answer=True))

    def event(self, *, is_answer):
        from google.adk.events import Event
        from google.genai import types

        role, text = ("model", REPLIED) if is_answer else ("user", ASKED)
        content = types.Content(role=role, parts=[types.Part(text=text)])
        return Event(author="bench" if is_answer else "user", invocation_id=uuid.uuid4().hex, content=content)


class LangGraph:
    """AsyncPostgresSaver below a graph of one node that answers."""

    async def open(self, url):
        from langchain_core.messages import AIMessage
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from langgraph.graph import END, START, MessagesState, StateGraph
        from psycopg.rows import dict_row
        from psycopg_pool import AsyncConnectionPool

        options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
        self.pool = AsyncConnectionPool(url, min_size=1, max_size=20, kwargs=options, open=False)
        await self.pool.open()
        saver = AsyncPostgresSaver(self.pool)
        await saver.setup()

        async def answer(_state):
            return {"messages": [AIMessage(REPLIED)]}

        builder = StateGraph(MessagesState)
        builder.add_node("answer", answer)
        builder.add_edge(START, "answer")
        builder.add_edge("answer", END)
        self.graph = builder.compile(checkpointer=saver)

    async def fill(self, turns):
        from langchain_core.messages import AIMessage, HumanMessage

        config = {"configurable": {"thread_id": str(uuid.uuid4())}}
        messages = [AIMessage(REPLIED) if number % 2 else HumanMessage(ASKED) for number in range(turns)]
        await self.graph.aupdate_state(config, {"messages": messages}, as_node="answer")
        return config

    async def step(self, config):
        from langchain_core.messages import HumanMessage

        await self.graph.ainvoke({"messages": [HumanMessage(ASKED)]}, config)


LIBRARIES = {
    "asyncpg": RawAsyncpg,
    "openai-agents": OpenAIAgents,
    "google-adk": GoogleAdk,
    "langgraph": LangGraph,
}


def sqlalchemy_url(url):
    """The URL for SQLAlchemy, with the directory of the socket as it expects it."""
    parts = urlsplit(url)
    host = parse_qs(parts.query)["host"][0]
    return f"postgresql+asyncpg://{parts.username}@/{parts.path[1:]}?host={host}"


async def take_steps(library, conversations, steps):
    durations = []

    async def run_client(key):
        for _ in range(steps):
            began = time.perf_counter()
            await library.step(key)
            durations.append((time.perf_counter() - began) * 1000)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run_client(key) for key in conversations))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = len(durations)
    durations.sort()
    return {"steps_per_second": count / seconds, "cpu_ms": cpu * 1000 / count, "median_ms": durations[count // 2]}


async def main(name, url, cores):
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    library = LIBRARIES[name]()
    await library.open(url)
    conversations = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        result = {}
        if command["do"] == "prepare":
            conversations = [await library.fill(command["turns"]) for _ in range(command["clients"])]
        else:
            result = await take_steps(library, conversations, command["steps"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
