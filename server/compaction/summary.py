"""Summing up the oldest segments, when the history has outgrown the model's window.

The model is asked behind the very prefix that it has just been talking behind, so the provider reads it from its cache,
and only the request itself is new. The call is kept like any other, see `background_call`. A process that dies over it
finds its answer again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from server.compaction.background_call import BackgroundCalls
from server.conversation.assistant import AssistantDefinition
from server.conversation.block import Block, TextBlock, ToolCallBlock
from server.conversation.epoch import Segment
from server.conversation.errors import ProviderEmpty
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.conversation.store import History
from server.conversation.turn import StopReason
from server.payload.renderer import Renderer
from server.payload.settings import read_settings
from server.providers.provider import Provider, ProviderAnswer

SUMMARY: Final = "summary"
"""The `kind` of the note that is kept with the call."""
_SPARE: Final = 2
"""How many times the limit the answer may have: one that is cut off is of no use, and thinking counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuestion:
    """What is asked beside the prefix."""

    task: str
    limit_tokens: int
    """How long the summary may be."""


def build_summary_payload(
    provider: Provider, definition: AssistantDefinition, static_text: str, question: SummaryQuestion
) -> Payload:
    """The request. The same values give the same bytes."""
    data = provider.user_message((TextBlock(text=question.task),), {})
    return Payload(
        model=definition.model,
        static_text=static_text,
        tools=definition.tools,
        messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
        settings=replace(
            read_settings(definition.settings),
            max_output_tokens=_SPARE * question.limit_tokens,
            stop_sequences=(),
        ),
    )


_WORDS_PER_TOKEN: Final = 0.5
"""Asked for rather too few, since a summary that is cut off is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """What is to be summed up."""

    history: History
    """With its texts."""
    static_text: str
    count: int
    """How many of the oldest segments."""

    @property
    def segments(self) -> Sequence[Segment]:
        return self.history.segments[: self.count]


class Summariser:
    """Asks the assistant's own model."""

    def __init__(self, calls: BackgroundCalls, renderer: Renderer, *, limit_tokens: int = 4_000) -> None:
        self._calls = calls
        self._renderer = renderer
        self._limit_tokens = limit_tokens

    def choose(self, segments: Sequence[Segment]) -> int:
        """How many of the oldest segments are worth a summary."""
        return choose_summarised(segments, self._limit_tokens)

    async def summarise(self, tenant_id: str, request: SummaryRequest) -> str:
        """The summary. Raises `ProviderFailed`, also where the model said something that is no summary."""
        history, first, last = request.history, request.segments[0], request.segments[-1]
        rendered = await self._renderer.render_summary_request(
            tenant_id, first.first_seq, last.last_seq, round(self._limit_tokens * _WORDS_PER_TOKEN)
        )
        question = SummaryQuestion(task=rendered.text, limit_tokens=self._limit_tokens)
        payload = build_summary_payload(
            self._calls.provider_of(history), history.source.assistant.definition, request.static_text, question
        )
        answer = await self._calls.ask(
            tenant_id,
            history,
            payload,
            note={
                "kind": SUMMARY,
                "segments": request.count,
                "task": question.task,
                "limit_tokens": question.limit_tokens,
                "template_hash": rendered.template_hash.hex(),
            },
            accepts=_is_summary,
            template_source=rendered.template_source,
        )
        return _read_summary(answer)


def choose_summarised(segments: Sequence[Segment], limit_tokens: int) -> int:
    """How many of the oldest segments to sum up: half of the history, so that it is not soon to do again.

    None of them where they are so short that a summary would hardly be shorter: what is in the window then is something
    else, and summing up again and again would only cost.
    """
    least = max(sum(segment.token_count for segment in segments) / 2, 2 * limit_tokens)
    total = 0
    for count, segment in enumerate(segments, start=1):
        total += segment.token_count
        if total >= least:
            return count
    return 0


def _read_summary(answer: ProviderAnswer) -> str:
    """Raises `ProviderEmpty` for an answer that is none."""
    if not _is_summary(answer):
        raise ProviderEmpty("The model gave no summary.", stop_reason=str(answer.stop_reason))
    return _text_of(answer.blocks)


def _is_summary(answer: ProviderAnswer) -> bool:
    """Not where it was cut off or refused, is a tool call, or nothing at all."""
    calls = any(isinstance(block, ToolCallBlock) for block in answer.blocks)
    return answer.stop_reason is StopReason.END_TURN and not calls and bool(_text_of(answer.blocks))


def _text_of(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock)).strip()
