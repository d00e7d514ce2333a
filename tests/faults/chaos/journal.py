"""The journal of a chaos run: what clients sent and received, and what the providers received and answered.

It is written as JSON lines, one per fact, in the order in which the facts became known. The checker reads this, the
database, and the HTTP API of the servers. Nothing in this module, nor in `client` and `checker`, imports the code under
test.

| fact           | members                                                                                       |
|----------------|-----------------------------------------------------------------------------------------------|
| `created`      | `conversation`, `provider`                                                                    |
| `sent`         | `key`, `conversation`, `body`: before the request is sent                                     |
| `started`      | `key`, `conversation`, `input_seq`, `seq`: the server has acknowledged the input              |
| `event`        | `conversation`, `seq`, `id`, `name`, `data`: an event of a stream                             |
| `ended`        | `key`, `conversation`, `seq`, `turn`: the end of a turn as a client received it               |
| `refused`      | `key`, `status`, `code`: the server has refused the input permanently                         |
| `asked`        | `provider`, `number`, `request_sha256`, `fuzzed`: a provider has received a request           |
| `answered`     | `provider`, `number`, `status`, `file`, `complete`: the bytes that were sent to the server    |
| `fault`        | `kind`, `detail`: what the run has broken                                                     |
| `stuck`        | `key`, `conversation`: a client gave up waiting                                               |
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """An append-only file of facts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "answers").mkdir(exist_ok=True)
        self._began = time.monotonic()
        self._file = (directory / "journal.jsonl").open("a", encoding="utf-8", buffering=1)

    def write(self, fact: str, **members: Any) -> None:
        at = round(time.monotonic() - self._began, 3)
        self._file.write(json.dumps({"fact": fact, "at": at, **members}) + "\n")

    def keep_answer(self, name: str, body: bytes) -> None:
        (self.directory / "answers" / name).write_bytes(body)

    def close(self) -> None:
        self._file.close()


def read_journal(directory: Path) -> Iterator[dict[str, Any]]:
    """All facts, oldest first."""
    with (directory / "journal.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def read_answer(directory: Path, name: str) -> bytes:
    return (directory / "answers" / name).read_bytes()
