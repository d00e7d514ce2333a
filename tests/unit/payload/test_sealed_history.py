"""A history that is rendered step by step, as turns arrive, gives the same bytes as one that is rendered at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock, encode_blocks
from server.conversation.epoch import NOTHING_REJECTED, Rejected
from server.conversation.manifest import list_message_entries
from server.conversation.payload import CallSettings, LayerOrder
from server.conversation.store import BufferedTurn
from server.conversation.turn import STRATA_DIALECT, Native, TurnKind, TurnState
from server.payload.messages import PayloadSpec, RenderedHistory, SealedHistory, outline_history, render_history
from server.payload.shared_caches import HistoryCache
from server.payload.signatures import SignatureScope
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.model_profile import find_profile
from server.providers.provider import Provider

HERE, ELSEWHERE = b"here", b"elsewhere"
PROVIDERS: dict[str, Provider] = {"gemini": GeminiProvider("key"), "anthropic": AnthropicProvider("key")}
MODELS = {"gemini": ("gemini-3.8-flash", "gemini-4-argon"), "anthropic": ("claude-fable-5-2", "claude-sonnet-5")}
SERVER_CALL = (
    b'{"role":"assistant","content":[{"type":"text","text":"Hm."},'
    b'{"type":"server_tool_use","id":"s1","name":"web_search","input":{}}]}'
)

call_ids = st.sampled_from(["a", "b", "c"])
texts = st.builds(TextBlock, text=st.sampled_from(["Yes.", "No.", ""]))
calls = st.builds(ToolCallBlock, id=call_ids, name=st.just("f"), arguments=st.just({"x": 1}))
results = st.builds(ToolResultBlock, tool_call_id=call_ids, output=st.sampled_from([1, "two", {"three": 3}]))
Drawn: TypeAlias = tuple[TurnKind, list[Block], dict[str, Any]]
tasks: st.SearchStrategy[Drawn] = st.tuples(
    st.just(TurnKind.USER_TASK), st.lists(texts, min_size=1, max_size=2), st.just({})
)
responses: st.SearchStrategy[Drawn] = st.tuples(
    st.just(TurnKind.TOOL_RESPONSE), st.lists(results, max_size=3), st.just({})
)


@st.composite
def answers(draw: st.DrawFn) -> Drawn:
    provider = draw(st.sampled_from(["gemini", "anthropic"]))
    blocks: list[Block] = list(draw(st.lists(st.one_of(texts, calls), max_size=3)))
    data = PROVIDERS[provider].foreign_message(blocks) or b""
    if provider == "anthropic" and draw(st.integers(0, 4)) == 0:
        blocks, data = [TextBlock(text="Hm.")], SERVER_CALL
    return (
        TurnKind.MODEL_RESPONSE,
        blocks,
        {
            "native": Native(dialect=provider, data=data),
            "provider": provider,
            "model": draw(st.sampled_from(MODELS[provider])),
            "model_version": draw(st.sampled_from([None, *MODELS[provider]])),
            "account": draw(st.sampled_from(["one", "other"])),
            "prefix_hash": draw(st.sampled_from([HERE, ELSEWHERE, None])),
            "dynamic": draw(st.sampled_from([None, b'{"todos":[]}', b'{"todos":[1]}'])),
            "state": draw(st.sampled_from([TurnState.COMPLETE, TurnState.COMPLETE, TurnState.CANCELLED])),
        },
    )


histories = st.lists(st.one_of(tasks, responses, answers()), min_size=1, max_size=24)


def as_turns(history: Sequence[Drawn]) -> tuple[BufferedTurn, ...]:
    return tuple(
        BufferedTurn(
            **{
                "seq": seq,
                "kind": kind,
                "state": TurnState.COMPLETE,
                "native": Native(dialect=STRATA_DIALECT, data=encode_blocks(tuple(blocks))),
                "blocks": tuple(blocks),
                "provider": None,
                "model": None,
                "account": None,
                "prefix_hash": None,
                "dynamic": None,
                "language": None,
                "args": None,
                **fields,
            }
        )
        for seq, (kind, blocks, fields) in enumerate(history, start=1)
    )


def build_spec(provider: str, order: LayerOrder, rejected: Rejected) -> PayloadSpec:
    profile = find_profile(provider, MODELS[provider][0])
    return PayloadSpec(
        provider=PROVIDERS[provider],
        epoch=1,
        scope=SignatureScope(provider=provider, account="one", profile=profile, prefix_hash=HERE, rejected=rejected),
        order=order,
        settings=CallSettings(),
        tools=(),
        static_text="",
        dynamic=None,
        blobs={},
    )


specs = st.builds(
    build_spec,
    st.sampled_from(["gemini", "anthropic"]),
    st.sampled_from(LayerOrder),
    st.builds(Rejected, signatures_through_seq=st.integers(0, 6), calls_through_seq=st.integers(0, 6)),
)


def requests_of(turns: tuple[BufferedTurn, ...]) -> list[tuple[BufferedTurn, ...]]:
    """The buffers for which a payload is built: those that end with an input."""
    return [turns[:end] for end in range(1, len(turns) + 1) if turns[end - 1].kind is not TurnKind.MODEL_RESPONSE]


@settings(max_examples=300)
@given(history=histories, spec=specs, skipped=st.sets(st.integers(0, 23)))
def test_a_history_rendered_as_it_grows_equals_one_rendered_at_once(
    history: list[Drawn], spec: PayloadSpec, skipped: set[int]
) -> None:
    """`skipped` are the requests that another process makes: this one does not see them."""
    sealed: SealedHistory | None = None
    for index, turns in enumerate(requests_of(as_turns(history))):
        if index in skipped:
            continue
        whole = render_history(turns, spec, dynamic="now")
        grown = render_history(turns, spec, dynamic="now", sealed=sealed)
        assert_same(grown, whole)
        assert [message.seq for message in whole.messages] == [step.seq for step, _ in outline_history(turns, spec)]
        sealed = grown.sealed


def assert_same(grown: RenderedHistory, whole: RenderedHistory) -> None:
    assert (grown.messages, grown.repairs, grown.withheld) == (whole.messages, whole.repairs, whole.withheld)
    joined = grown.messages[: grown.sealed.joined_count]
    assert grown.sealed.joined == b",".join(message.data for message in joined)
    assert grown.sealed.entries == tuple(list_message_entries(joined))


def plain(exchanges: int) -> tuple[BufferedTurn, ...]:
    reply = {
        "native": Native(dialect="anthropic", data=b'{"role":"assistant","content":[{"type":"text","text":"Yes."}]}'),
        "provider": "anthropic",
        "model": MODELS["anthropic"][0],
        "account": "one",
        "prefix_hash": HERE,
    }
    said: list[Drawn] = []
    for _ in range(exchanges):
        said += [(TurnKind.USER_TASK, [TextBlock(text="Go.")], {}), (TurnKind.MODEL_RESPONSE, [], reply)]
    return as_turns([*said, (TurnKind.USER_TASK, [TextBlock(text="Go.")], {})])


def test_only_the_new_turns_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_spec("anthropic", LayerOrder.APPEND_ONLY, NOTHING_REJECTED)
    rendered: list[bytes] = []
    encode = PROVIDERS["anthropic"].user_message

    def encode_and_count(*given: Any) -> bytes:
        rendered.append(encode(*given))
        return rendered[-1]

    monkeypatch.setattr(PROVIDERS["anthropic"], "user_message", encode_and_count)
    sealed = render_history(plain(200), spec).sealed
    assert len(rendered) == 201
    rendered.clear()
    render_history(plain(201), spec, sealed=sealed)
    assert len(rendered) == 2


@pytest.mark.parametrize("change", [{"epoch": 2}, {"order": LayerOrder.LAYERED}])
def test_a_sealed_history_of_another_epoch_or_order_is_not_used(change: dict[str, Any]) -> None:
    spec = build_spec("anthropic", LayerOrder.APPEND_ONLY, NOTHING_REJECTED)
    sealed = render_history(plain(3), spec).sealed
    changed = replace(spec, **change)
    wrong = replace(sealed, messages=())
    assert render_history(plain(4), changed, sealed=wrong) == render_history(plain(4), changed)


def test_cached_images_count_towards_the_limit_of_the_cache() -> None:
    """A turn refers to its image by a hash. Its message contains the image."""
    spec = build_spec("anthropic", LayerOrder.APPEND_ONLY, NOTHING_REJECTED)
    turns = plain(4)
    sealed = render_history(turns, spec).sealed
    image = b"x" * 1_000_000
    grown = replace(sealed, messages=(*sealed.messages[:-1], replace(sealed.messages[-1], data=image)))
    cache = HistoryCache(limit_bytes=2_500_000)
    for conversation_id in ("a", "b", "c"):
        cache.put(conversation_id, turns, "anthropic", grown)
    assert [name for name in ("a", "b", "c") if cache.find(name) is not None] == ["b", "c"]
