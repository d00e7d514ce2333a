"""The README's tables are the code's."""

import re
from pathlib import Path

import click

from server.cli import main
from server.web.app import ROUTES

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_routes_in_the_readme_are_the_routes_of_the_server() -> None:
    section = README.partition("## HTTP")[2].partition("\n## ")[0]
    written = set()
    for methods, paths in re.findall(r"^\| ([A-Z, ]+) (`.*?`(?:, `.*?`)*) \|", section, re.MULTILINE):
        written |= {(method.strip(), path) for method in methods.split(",") for path in re.findall("`(.*?)`", paths)}
    served = {
        (str(method), re.sub(r":\w+}", "}", path))
        for route in ROUTES
        for path in route.paths  # type: ignore[union-attr]  # reason: they are all handlers
        for method in route.http_methods  # type: ignore[union-attr]  # reason: as above
        if str(method) != "HEAD"
    } | {("GET", "/schema")}
    assert written == served


def test_the_commands_in_the_readme_are_the_commands_there_are() -> None:
    section = README.partition("## The command")[2].partition("\n## ")[0]
    written = set(re.findall(r"`strata ([a-z]+)", section))
    context = click.Context(main)
    listed = {name for name in main.list_commands(context) if not main.get_command(context, name).hidden}  # type: ignore[union-attr]
    assert written == listed
