"""`strata emulate`: local servers that emulate the providers, without a key and without cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from server.cli.run import run
from server.emulator.exchange import ASGIApp
from server.emulator.latency import FULL_SPEED, MODEL_LATENCY
from server.emulator.script import Script, ScriptInvalid, load_script
from server.emulator.server import serve_emulator
from server.emulator.state import EmulatorState, build_state


@click.group()
def emulate() -> None:
    """Emulate a provider's API on this machine.

    The emulators are strict: they enforce the documented rules and return the documented errors. They accept any API
    key except `invalid`. Without a script they generate answers. docs/guides/emulators.md describes them.
    """


def _read_script(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Script | None:
    try:
        return load_script(path) if path else None
    except ScriptInvalid as error:
        raise click.BadParameter(str(error)) from error


def _options(port: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same answers."),
            click.option("--full-speed", is_flag=True, help="Answer without the delays of a model."),
            click.option(
                "--script",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                callback=_read_script,
                help="YAML file with answers and faults.",
            ),
            click.option(
                "--port",
                type=click.IntRange(0, 65535),
                default=port,
                show_default=True,
                help="Port; 0 picks a free one.",
            ),
            click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        ):
            command = option(command)
        return command

    return decorate


@emulate.command()
@_options(8401)
@click.option("--no-implicit-cache", is_flag=True, help="Never report reads from the implicit cache.")
def gemini(*, no_implicit_cache: bool, **options: Any) -> None:
    """Emulate the Gemini Developer API."""
    from server.emulator.gemini.app import build_gemini_app  # noqa: PLC0415  reason: only the chosen emulator is loaded

    def build(state: EmulatorState) -> ASGIApp:
        return build_gemini_app(state, implicit_cache=not no_implicit_cache)

    _serve(build, "Gemini", "GOOGLE_GEMINI_BASE_URL", **options)


@emulate.command()
@_options(8402)
def anthropic(**options: Any) -> None:
    """Emulate the Claude API."""
    from server.emulator.anthropic.app import build_anthropic_app  # noqa: PLC0415  reason: as above

    _serve(build_anthropic_app, "Claude", "ANTHROPIC_BASE_URL", **options)


def _serve(
    build: Callable[[EmulatorState], ASGIApp],
    name: str,
    variable: str,
    *,
    host: str,
    port: int,
    script: Script | None,
    full_speed: bool,
    seed: int,
) -> None:
    state = build_state(script=script, latency=FULL_SPEED if full_speed else MODEL_LATENCY, seed=seed)

    def announce(url: str) -> None:
        click.echo(f"Emulating {name} on {url}. Set this variable for an SDK, with any API key:", err=True)
        click.echo(f"export {variable}={url}")

    run(serve_emulator(build(state), host, port, announce))
