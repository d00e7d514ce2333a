"""The virtual environments of the peers: one each under .venv-peers, made when it is first needed."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DIRECTORY = Path(__file__).parents[3] / ".venv-peers"
PACKAGES: Mapping[str, Sequence[str]] = {
    "smg": ["smg"],
    "litellm": ["litellm[proxy]"],
    "langgraph": ["langgraph", "langgraph-checkpoint-postgres", "psycopg[binary,pool]"],
    "openai-agents": ["openai-agents[sqlalchemy]", "asyncpg"],
    "google-adk": ["google-adk", "sqlalchemy[asyncio]", "asyncpg"],
}
"""The newest releases: the report names the versions."""


class PeerUnavailable(Exception):
    """A peer cannot be installed or does not start here; the message is the reason."""


def install(name: str) -> Path:
    """The directory of the environment's programs. Raises `PeerUnavailable`."""
    environment = DIRECTORY / name
    programs, stamp = environment / "bin", environment / "installed.stamp"
    if not stamp.exists():
        pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        for command in ([sys.executable, "-m", "venv", str(environment)], [*pip, *PACKAGES[name]]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["no output"]
                raise PeerUnavailable(f"cannot be installed: {last[0]}")
        stamp.touch()
    return programs


def read_version(name: str) -> str:
    """The installed release."""
    python, package = DIRECTORY / name / "bin" / "python", PACKAGES[name][0].partition("[")[0]
    code = f"import importlib.metadata, json; print(json.dumps(importlib.metadata.version({package!r})))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout))
