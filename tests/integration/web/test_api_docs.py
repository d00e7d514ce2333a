"""The guide on the API is correct: its examples run, and its routes and events are complete."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from server.emulator.reply import FaultKind, Reply, ToolCall
from server.web.app import ROUTES
from server.web.sse import EVENTS
from tests.conftest import StrataServer
from tests.support.emulators import EmulatedProviders
from tests.support.strata_process import PROJECT

PAGE = (PROJECT / "docs/guides/http-api.md").read_text(encoding="utf-8")
ASKS = Reply(tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),))
GIF_SHA256 = "6adc3d4c1056996e4e8b765a62604c78b1f867cceb3b15d0b9bedb7c4857f992"
EXPORTED = {
    "ASSISTANT": r'"id":"(asst_\w+)"',
    "CONVERSATION": r'"id":"(conv_\w+)"',
    "CALL": r'"pending_tool_calls":\[{"id":"([^"]+)"',
    "VIEW": r'"id":"(view_\w+)"',
    "KEY": r'"id":"(key_\w+)"',
    "REPLAY": r'"id":"(replay_\w+)"',
}
"""The variables that the page exports, and where they come from."""


def test_every_route_has_a_section_and_every_section_a_route() -> None:
    written = set(re.findall(r"^### ([A-Z]+) (/(?:v1|admin)\S+)$", PAGE, re.MULTILINE))
    served = {
        (str(method), re.sub(r":\w+}", "}", path))
        for route in ROUTES
        for path in route.paths  # type: ignore[union-attr]  # reason: they are all handlers
        for method in route.http_methods  # type: ignore[union-attr]  # reason: as above
        if path.startswith(("/v1", "/admin"))
    }
    assert written == served


def test_the_documented_events_are_those_of_the_server() -> None:
    section = PAGE.partition("### Events")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", section, re.MULTILINE) == list(EVENTS.items())


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are for curl")
async def test_the_examples_work_in_their_order(
    strata_server: StrataServer, emulated: EmulatedProviders, tmp_path: Path
) -> None:
    (tmp_path / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    known = {
        "PATH": os.environ["PATH"],
        "CURL_HOME": str(tmp_path),
        "STRATA_URL": strata_server.url,
        "STRATA_API_KEY": strata_server.client_key,
        "ADMIN_KEY": strata_server.admin_key,
        "SHA256": GIF_SHA256,
    }
    emulated.gemini.queue_replies(ASKS)
    examples = re.findall(r"```sh\n(curl.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 57
    for example in examples:
        if "respond-async" in example:
            emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=1)
        printed = await run(example, known, tmp_path)
        for name, pattern in EXPORTED.items():
            if name not in known and (found := re.search(pattern, printed)):
                known[name] = found[1]
        if "tool_results" in example:
            assert "event: turn.completed" in printed
        if "/events" in example:
            assert printed.startswith("id: 2\n")
        if "/conversations/$CONVERSATION/cancel" in example:
            assert '"state":"cancelled"' in printed
    assert (tmp_path / "image.gif").read_bytes().startswith(b"GIF89a")


async def run(example: str, known: dict[str, str], directory: Path) -> str:
    """The output of an example, which has to succeed."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-eu", "-c", example, env=known, cwd=directory,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, f"{example}\n{printed}"
    return printed


def test_the_responses_on_the_page_are_json() -> None:
    for example in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        assert json.loads(example)
