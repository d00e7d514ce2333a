"""Bytes cut into pieces, as a network may cut them."""

from hypothesis import strategies as st


@st.composite
def split(draw: st.DrawFn, body: bytes) -> list[bytes]:
    """The body in pieces, among them empty ones and single bytes."""
    if draw(st.integers(0, 9)) == 0:
        return [body[at : at + 1] for at in range(len(body))]
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=12)))
    return [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
