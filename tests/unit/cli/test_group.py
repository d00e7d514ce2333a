"""The group imports a command only when it is used."""

import subprocess
import sys

HEAVY = ("anthropic", "asyncpg", "google.genai", "httpx", "litestar", "prompt_toolkit", "rich", "sqlalchemy", "uvicorn")
SCRIPT = f"""
import sys
from server.cli import main
try:
    main(["--help"])
except SystemExit as ended:
    print([name for name in {HEAVY!r} if name in sys.modules], ended.code)
"""


def test_help_imports_no_sdk_no_framework_and_no_driver() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)

    assert "Commands:" in result.stdout
    assert result.stdout.splitlines()[-1] == "[] 0"
