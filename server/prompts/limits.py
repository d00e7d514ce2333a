"""How much one task of a worker may use, and how many workers there are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """For templates and expressions that came over the network. Of the server's own dynamic layer only the length is
    limited.
    """

    seconds: float = 2.0
    """Of processor time: a busy machine makes no template a bad one."""
    output_chars: int = 2_000_000
    memory_bytes: int = 512 * 1024 * 1024
    """Of the whole process that renders, the interpreter included."""
    workers: int = 3
    """Processes at most. They are started when they are needed."""
    wait_seconds: float = 10.0
    """How long a task waits for a free worker."""
