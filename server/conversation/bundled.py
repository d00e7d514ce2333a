"""Files that are distributed with the package: migrations and templates."""

from pathlib import Path


def find_bundled(name: str) -> Path:
    """Return a bundled directory: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / name
    return installed if installed.is_dir() else package.parent / name
