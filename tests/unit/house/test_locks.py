"""The lock files contain every dependency with its hashes and name no package host."""

import re
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from server import __version__
from tests.unit.house.repository import pyproject, read

LOCKS = ("build", "dev", "run")


def locked(lock: str) -> Iterator[tuple[Requirement, int]]:
    """Each pinned requirement and the number of its hashes."""
    text = re.sub(r"^#.*\n", "", read(f"requirements/{lock}.txt"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=sha256:")
        yield Requirement(requirement), len(hashes)


def declared(lock: str) -> list[Requirement]:
    project = pyproject()
    texts = project["project"]["dependencies"] if lock == "run" else project["dependency-groups"][lock]
    return [Requirement(text) for text in texts]


def versions(lock: str) -> dict[str, str]:
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin, _ in locked(lock)}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_entry_is_pinned_to_one_version_with_hashes(lock: str) -> None:
    loose = [
        str(pin) for pin, hashes in locked(lock) if not hashes or not re.fullmatch(r"==[^*,]+", str(pin.specifier))
    ]

    assert loose == []


@pytest.mark.parametrize("lock", LOCKS)
def test_every_declared_dependency_is_locked_in_a_matching_version(lock: str) -> None:
    pins = versions(lock)

    unfit = [
        str(wanted)
        for wanted in declared(lock)
        if not wanted.specifier.contains(pins.get(canonicalize_name(wanted.name), "0"), prereleases=True)
    ]

    assert unfit == [], "run `make lock`"


def test_a_package_in_several_locks_has_the_same_version_in_all_of_them() -> None:
    seen: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version in versions(lock).items():
            seen.setdefault(name, set()).add(version)

    assert {name: found for name, found in seen.items() if len(found) > 1} == {}


@pytest.mark.parametrize("lock", LOCKS)
def test_no_lock_names_a_host_or_a_local_path(lock: str) -> None:
    text = read(f"requirements/{lock}.txt")

    assert not re.search(r"://|file:|@ |--(extra-)?index-url|--find-links|--trusted-host|^-", text, re.MULTILINE)


def test_the_build_backend_is_locked_as_it_is_required() -> None:
    assert pyproject()["build-system"]["requires"] == pyproject()["dependency-groups"]["build"]


def test_the_package_reports_its_version() -> None:
    assert __version__ == pyproject()["project"]["version"]
