"""The long chaos run: `python -m tests.faults.chaos --kills 500`. Exits with 1 if a guarantee was broken."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.chaos.run import Plan, run_chaos


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=500, help="processes to kill (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="time limit (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices of an earlier run")
    parser.add_argument("--directory", type=Path, default=None, help="for the journal (default: a temporary one)")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="strata-chaos-"))
    _show(f"seed {seed}, journal in {directory}")
    plan = Plan(seed=seed, kills=arguments.kills, seconds=arguments.minutes * 60)
    outcome = asyncio.run(run_chaos(plan, directory, show=_show))
    _show(outcome.report())
    sys.exit(0 if outcome.is_clean else 1)


def _show(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
