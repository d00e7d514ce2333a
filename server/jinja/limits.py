"""How much one rendering may use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """For an instruction, whose author may be anybody. Of the dynamic layer only the length is limited."""

    seconds: float = 2.0
    """Of processor time: a busy machine makes no template a bad one."""
    output_chars: int = 2_000_000
    memory_bytes: int = 512 * 1024 * 1024
    """Of the whole process that renders, the interpreter included."""
