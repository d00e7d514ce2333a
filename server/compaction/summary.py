"""Summaries of the oldest segments, for a history that has outgrown the model's window.

The assistant's own model is asked for the summary after the very prefix of the conversation's last call, so the
provider reads the prefix from its cache and only the request for the summary is new. The call is stored, see
`background_call`: a process that crashes during the call finds the answer again.
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
"""The `kind` of the note that is stored with the call."""
_OUTPUT_FACTOR: Final = 2
"""The output limit as a multiple of the summary's limit: a truncated summary is useless, and thinking
counts as output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPrompt:
    """The request for a summary, without the prefix."""

    task: str
    limit_tokens: int
    """The maximum length of the summary."""


def build_summary_payload(
    provider: Provider, definition: AssistantDefinition, static_text: str, prompt: SummaryPrompt
) -> Payload:
    """Build the request. The same values give the same bytes."""
    data = provider.user_message((TextBlock(text=prompt.task),), {})
    return Payload(
        model=definition.model,
        static_text=static_text,
        tools=definition.tools,
        messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
        settings=replace(
            read_settings(definition.settings),
            max_output_tokens=_OUTPUT_FACTOR * prompt.limit_tokens,
            stop_sequences=(),
        ),
    )


_WORDS_PER_TOKEN: Final = 0.5
"""A low estimate, because a truncated summary is useless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """What is to be summarised."""

    history: History
    """With the texts of its segments."""
    static_text: str
    count: int
    """The number of oldest segments."""

    @property
    def segments(self) -> Sequence[Segment]:
        return self.history.segments[: self.count]


class Summariser:
    """Requests summaries from the assistant's own model."""

    def __init__(self, calls: BackgroundCalls, renderer: Renderer, *, limit_tokens: int = 4_000) -> None:
        self._calls = calls
        self._renderer = renderer
        self._limit_tokens = limit_tokens

    def choose(self, segments: Sequence[Segment]) -> int:
        """Return how many of the oldest segments are worth summarising."""
        return count_summarised(segments, self._limit_tokens)

    async def summarise(self, tenant_id: str, request: SummaryRequest) -> str:
        """Return the summary. Raises `ProviderFailed`, also if the model's answer is no summary."""
        history, first, last = request.history, request.segments[0], request.segments[-1]
        rendered = await self._renderer.render_summary_request(
            tenant_id, first.first_seq, last.last_seq, round(self._limit_tokens * _WORDS_PER_TOKEN)
        )
        prompt = SummaryPrompt(task=rendered.text, limit_tokens=self._limit_tokens)
        payload = build_summary_payload(
            self._calls.provider_of(history), history.source.assistant.definition, request.static_text, prompt
        )
        answer = await self._calls.ask(
            tenant_id,
            history,
            payload,
            note={
                "kind": SUMMARY,
                "segments": request.count,
                "task": prompt.task,
                "limit_tokens": prompt.limit_tokens,
                "template_hash": rendered.template_hash.hex(),
            },
            accepts=_is_summary,
            template_source=rendered.template_source,
        )
        return _read_summary(answer)


def count_summarised(segments: Sequence[Segment], limit_tokens: int) -> int:
    """Return how many of the oldest segments to summarise: half of the history, so that the next summary is far away.

    0 if the segments are so short that a summary would hardly be shorter. Then something else fills the window, and
    repeated summaries would only cost money.
    """
    min_tokens = max(sum(segment.token_count for segment in segments) / 2, 2 * limit_tokens)
    total = 0
    for count, segment in enumerate(segments, start=1):
        total += segment.token_count
        if total >= min_tokens:
            return count
    return 0


def _read_summary(answer: ProviderAnswer) -> str:
    """Raises `ProviderEmpty` if the answer is no summary."""
    if not _is_summary(answer):
        raise ProviderEmpty("The model returned no summary.", stop_reason=str(answer.stop_reason))
    return _text_of(answer.blocks)


def _is_summary(answer: ProviderAnswer) -> bool:
    """False if the answer was truncated or refused, contains a tool call, or is empty."""
    calls = any(isinstance(block, ToolCallBlock) for block in answer.blocks)
    return answer.stop_reason is StopReason.END_TURN and not calls and bool(_text_of(answer.blocks))


def _text_of(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock)).strip()
