"""What comes with the package and is no code: migrations and templates."""

from pathlib import Path


def find_bundled(name: str) -> Path:
    """A folder of theirs: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / name
    return installed if installed.is_dir() else package.parent / name
