"""Every guarantee of docs/operations/guarantees.md names the test that proves it, and that test exists."""

import ast
import re

import pytest

from tests.unit.house.repository import ROOT, read

PAGE = "docs/operations/guarantees.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED.findall(read(PAGE)))))
def test_a_named_test_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(ast.parse(read(path))) if isinstance(node, functions)}


def test_every_row_names_a_test() -> None:
    rows = [line for line in read(PAGE).splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []
