"""Renders a reply as parts, parts as chunks, and counts their tokens.

Order: thoughts (only if requested), text, function calls, each call in its own chunk. The signature is on the first
function call; without a call it is on the last part, which in a stream is a part with an empty text next to the finish
reason. The 2.5 models sign the first part, and only if they call a function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from server.emulator.gemini.models import GenerationConfig, Model
from server.emulator.latency import pieces
from server.emulator.reply import Reply
from server.emulator.tokens import count_json, count_tokens

Sign: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Returns the signature of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the response, with the tokens of the response so far."""

    parts: Sequence[Mapping[str, Any]] = ()
    """Empty for thoughts that are not requested."""
    thoughts_tokens: int = 0
    candidates_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response, not signed yet."""

    chunks: Sequence[Chunk]
    finish_reason: str = "STOP"
    candidate_fields: Mapping[str, Any] | None = None
    """Further fields of the candidate at its end."""

    @property
    def end(self) -> Chunk:
        """The tokens of the whole response."""
        return replace(self.chunks[-1], parts=()) if self.chunks else Chunk()


def plan_answer(reply: Reply, model: Model, config: GenerationConfig, make_id: Callable[[], str]) -> Answer:
    """Split the reply into pieces; MAX_TOKENS if the limit cuts it off. Thoughts count."""
    thinking = reply.thinking if config.thinks else ""
    chunks = list(_thought_chunks(thinking, shown=config.shows_thoughts))
    chunks += _text_chunks(_until_stop(reply.text, config.stop_sequences), count_tokens(thinking))
    chunks += _call_chunks(reply, model, chunks[-1] if chunks else Chunk(), make_id)
    limit = config.max_output_tokens
    kept = [chunk for chunk in chunks if chunk.thoughts_tokens + chunk.candidates_tokens <= limit]
    if len(kept) == len(chunks):
        return Answer(chunks=chunks)
    # Thoughts that are not shown end at the limit too.
    return Answer(chunks=kept or [Chunk(thoughts_tokens=limit)], finish_reason="MAX_TOKENS")


def render_stream(answer: Answer, model: Model, sign: Sign) -> list[Chunk]:
    """The chunks as they are sent. The last one carries the finish reason."""
    spoken = [chunk for chunk in answer.chunks if chunk.parts]
    calls = any("functionCall" in part for chunk in spoken for part in chunk.parts)
    if answer.finish_reason != "STOP":
        spoken.append(answer.end)
    elif not calls:
        spoken.append(replace(answer.end, parts=({"text": ""},)))
    place = _signed_place([part for chunk in spoken for part in chunk.parts], answer, model)
    return spoken if place is None else [_sign_in(chunk, place, index, sign) for index, chunk in enumerate(spoken)]


def render_unary(answer: Answer, model: Model, sign: Sign) -> Chunk:
    """The response as one chunk: a part for the thoughts, one for the text, one for each call."""
    merged: list[dict[str, Any]] = []
    for part in (part for chunk in answer.chunks for part in chunk.parts):
        last = merged[-1] if merged else {}
        if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
            last["text"] += part["text"]
        else:
            merged.append(dict(part))
    if answer.finish_reason == "STOP" and all(part.get("thought") for part in merged):
        merged.append({"text": ""})
    place = _signed_place(merged, answer, model)
    if place is not None:
        merged[place]["thoughtSignature"] = sign(merged[place])
    return replace(answer.end, parts=merged)


def _signed_place(parts: Sequence[Mapping[str, Any]], answer: Answer, model: Model) -> int | None:
    """The index of the signed part. A response that was cut off is not signed, unless it contains a call."""
    calls = [index for index, part in enumerate(parts) if "functionCall" in part]
    if calls:
        return calls[0] if model.validates_signatures else 0
    return len(parts) - 1 if model.validates_signatures and answer.finish_reason == "STOP" else None


def _sign_in(chunk: Chunk, place: int, index: int, sign: Sign) -> Chunk:
    # Chunks that are sent have one part each, so the index of a part is the index of its chunk.
    if index != place:
        return chunk
    (part,) = chunk.parts
    return replace(chunk, parts=({**part, "thoughtSignature": sign(part)},))


def _thought_chunks(thinking: str, *, shown: bool) -> Iterator[Chunk]:
    said = ""
    for piece in pieces(thinking) if shown else ([thinking] if thinking else []):
        said += piece
        part = {"text": piece, "thought": True}
        yield Chunk(parts=(part,) if shown else (), thoughts_tokens=count_tokens(said))


def _text_chunks(text: str, thoughts_tokens: int) -> Iterator[Chunk]:
    said = ""
    for piece in pieces(text):
        said += piece
        yield Chunk(parts=({"text": piece},), thoughts_tokens=thoughts_tokens, candidates_tokens=count_tokens(said))


def _call_chunks(reply: Reply, model: Model, before: Chunk, make_id: Callable[[], str]) -> Iterator[Chunk]:
    tokens = before.candidates_tokens
    for call in reply.tool_calls:
        shown = {"name": call.name, "args": dict(call.arguments)}
        tokens += count_json(shown)
        numbered = {"id": make_id(), **shown} if model.numbers_calls else shown
        yield replace(before, parts=({"functionCall": numbered},), candidates_tokens=tokens)


def _until_stop(text: str, stop_sequences: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stop_sequences if stop and stop in text]
    return text[: min(ends)] if ends else text
