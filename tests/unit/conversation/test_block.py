"""Blocks are encoded and decoded without loss."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import Block, TextBlock, UnknownBlock, block_from_json, decode_blocks, encode_blocks
from tests.support.strategies import blocks


@given(st.lists(blocks, max_size=6))
def test_any_blocks_come_back_as_they_were(given_blocks: list[Block]) -> None:
    assert decode_blocks(encode_blocks(given_blocks)) == tuple(given_blocks)


@given(st.lists(blocks, max_size=6))
def test_the_same_blocks_give_the_same_bytes(given_blocks: list[Block]) -> None:
    encoded = encode_blocks(given_blocks)
    assert encode_blocks(decode_blocks(encoded)) == encoded


def test_ordinary_text_is_plain_json() -> None:
    assert json.loads(encode_blocks([TextBlock(text="Grüße 😀")])) == [{"type": "text", "text": "Grüße 😀"}]


@pytest.mark.parametrize("item", [{"type": "hologram", "depth": 3}, {"depth": 3}, {"type": None}])
def test_a_block_of_an_unknown_type_is_kept_whole(item: dict[str, Any]) -> None:
    assert block_from_json(item) == UnknownBlock(data=item)
