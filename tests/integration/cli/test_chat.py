"""`strata chat` as a real process: on a terminal and in a pipe, against the whole program."""

import asyncio
import sys
from collections.abc import Mapping

import pytest

from server.emulator.reply import FaultKind, Reply, ToolCall
from tests.conftest import StrataServer
from tests.support.emulators import EmulatedProviders
from tests.support.strata_process import PROJECT, environment
from tests.support.terminal import open_terminal

CTRL_C, CTRL_D, ESCAPE = "\x03", "\x04", "\x1b"
PROMPT = r"\n>\x08?"


@pytest.fixture
def env(strata_server: StrataServer) -> dict[str, str]:
    return {"STRATA_URL": strata_server.url, "STRATA_API_KEY": strata_server.client_key}


async def pipe(*options: str, lines: str, env: Mapping[str, str]) -> tuple[int | None, str, str]:
    """`strata chat` without a terminal: exit code, output, errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "server",
        "chat",
        *options,
        env=environment(env),
        cwd=PROJECT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(lines.encode())
    return process.returncode, out.decode(), err.decode()


async def test_a_chat_in_a_terminal(env: dict[str, str], emulated: EmulatedProviders) -> None:
    emulated.gemini.queue_replies(Reply(thinking="Let me greet.", text="Good \x1b[31mday\x1b[0m to you."))
    async with open_terminal("chat", env=env) as terminal:
        conversation = await terminal.shows(r"(conv_\w+) · chat · gemini")
        await terminal.shows(PROMPT)
        terminal.press(f"One{ESCAPE}\rtwo\\\rthree\r")
        await terminal.shows("Let me greet.")
        await terminal.shows(r"Good ␛\[31mday␛\[0m to you.")
        await terminal.shows(r"turn 2 · [\d,]+ in \(0 % cached\) · \d+ out")
        assert "One\ntwo\nthree" in str(emulated.gemini.requests()[-1]["body"]).replace("\\n", "\n")

        # Ctrl-C clears the line, and the program continues.
        await terminal.shows(PROMPT)
        terminal.press(f"nonsense{CTRL_C}/help\r")
        await terminal.shows("/fork N")

        # While a turn runs it cancels the turn.
        await terminal.shows(PROMPT)
        emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=4)
        terminal.press("Tell me a story.\r")
        await terminal.shows("The user asks")
        terminal.press(CTRL_C)
        await terminal.shows("Cancelled. The partial answer is kept.")

        await terminal.shows(PROMPT)
        terminal.press("And now?\r")
        await terminal.shows("turn 6 · ")
        await terminal.shows(PROMPT)
        terminal.press(CTRL_D)
        assert await terminal.shows(r"strata chat --conversation (conv_\w+) --url") == conversation
        assert await terminal.process.wait() == 0

    async with open_terminal("chat", "--conversation", conversation, "--no-thinking", env=env) as terminal:
        await terminal.shows("> And now?")
        await terminal.shows("turn 6 · ")
        await terminal.shows(PROMPT)
        terminal.press("/exit\r")
        assert await terminal.process.wait() == 0


async def test_a_demo_tool_runs_in_the_chat(env: dict[str, str], emulated: EmulatedProviders) -> None:
    emulated.gemini.queue_replies(Reply(tool_calls=(ToolCall(name="get_time", arguments={}),)))
    async with open_terminal("chat", "--tools", "demo", env={**env, "NO_COLOR": "1"}) as terminal:
        await terminal.shows(PROMPT)
        terminal.press("What time is it?\r")
        await terminal.shows(r"→ get_time\(\)")
        await terminal.shows(r"← \d{4}-\d\d-\d\dT")
        await terminal.shows("turn 4 · ")
        await terminal.shows(PROMPT)
        terminal.press(CTRL_D)
        assert await terminal.process.wait() == 0
    assert "\x1b[36m" not in terminal.written


async def test_a_running_turn_is_followed(env: dict[str, str], emulated: EmulatedProviders) -> None:
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=4)
    async with open_terminal("chat", env=env) as first:
        conversation = await first.shows(r"(conv_\w+) · ")
        await first.shows(PROMPT)
        first.press("Tell me a story.\r")
        await first.shows("The user asks")
        async with open_terminal("chat", "--conversation", conversation, env=env) as second:
            await second.shows("> Tell me a story.")
            await second.shows("Turn 2 is running.")
            await second.shows("The user asks")
            second.press(CTRL_C)
            await second.shows("Cancelled. The partial answer is kept.")
        await first.shows("Cancelled. The partial answer is kept.")


async def test_a_pipe_gets_an_answer_per_line(env: dict[str, str], emulated: EmulatedProviders) -> None:
    emulated.gemini.queue_replies(
        Reply(thinking="Hm.", text="First answer."), Reply(thinking="Hm.", text="Second\x07 answer.")
    )
    code, out, err = await pipe(lines="One.\n\nTwo.", env=env)
    assert (code, out) == (0, "First answer.\nSecond␇ answer.\n")
    assert "strata chat --conversation conv_" in err


async def test_a_turn_that_fails_ends_a_pipe_with_1(env: dict[str, str], emulated: EmulatedProviders) -> None:
    emulated.gemini.inject_fault(FaultKind.CUT, after_chunks=4)
    code, _, err = await pipe(lines="One.\nTwo.\n", env=env)
    assert code == 1
    assert "[provider_disconnected]" in err
    assert len(emulated.gemini.requests()) == 1


@pytest.mark.parametrize(
    ("options", "extra", "code", "sentence"),
    [
        ([], {"STRATA_URL": "http://127.0.0.1:1"}, 69, "Cannot connect to http://127.0.0.1:1"),
        ([], {"STRATA_URL": "nonsense"}, 69, "'nonsense' is not the address of a server."),
        ([], {"STRATA_API_KEY": "strata_wrong"}, 77, "[key_rejected]"),
        ([], {"STRATA_API_KEY": ""}, 78, "No API key is set."),
        (["--conversation", "conv_none"], {}, 66, "[conversation_not_found]"),
        (["--conversation", "conv_1", "--model", "m"], {}, 2, "apply only to a new assistant"),
    ],
    ids=["no server", "no address", "wrong key", "no key", "no conversation", "contradiction"],
)
async def test_an_error_is_printed_on_one_line(
    env: dict[str, str], options: list[str], extra: dict[str, str], code: int, sentence: str
) -> None:
    ended, out, err = await pipe(*options, lines="Hi\n", env=env | extra)
    assert (ended, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err
    assert "strata_wrong" not in err
