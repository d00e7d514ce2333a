"""The content of an installation from a wheel."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.unit.house.repository import ROOT


def test_the_wheel_contains_migrations_templates_pages_and_the_configuration_of_alembic(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(ZipFile(wheel).namelist())

    here = [
        path.relative_to(ROOT)
        for folder in ("migrations", "templates")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert "server/_bundled/alembic.ini" in names
    assert {f"server/_bundled/{path.as_posix()}" for path in here} <= names
    assert "server/_bundled/templates/admin/login.html" in names
    assets = [path.relative_to(ROOT) for path in (ROOT / "server" / "web" / "admin" / "static").iterdir()]
    assert {path.suffix for path in assets} >= {".css", ".js", ".svg", ".md", ".txt"}
    assert {path.as_posix() for path in assets} <= names
    assert not {name for name in names if name.startswith("tests/")}
