"""The hash of a request is that of its bytes, whatever was hashed before."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from server.payload.shared_caches import RequestHashes

bodies = st.lists(st.binary(max_size=6), max_size=12).map(b"".join)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), bodies), max_size=12))
def test_every_digest_is_that_of_the_whole_body(requests: list[tuple[str, bytes]]) -> None:
    hashes = RequestHashes()
    for conversation_id, body in requests:
        assert hashes.digest(conversation_id, body) == hashlib.sha256(body).digest()


@given(st.lists(st.tuples(bodies, bodies), max_size=12))
def test_bodies_that_grow_in_front_of_a_changing_end_are_hashed_correctly(steps: list[tuple[bytes, bytes]]) -> None:
    hashes = RequestHashes()
    begin = b""
    for grown, end in steps:
        begin += grown
        assert hashes.digest("a", begin + end) == hashlib.sha256(begin + end).digest()
