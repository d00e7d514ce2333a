"""Parts that many requests of a conversation share: the static texts of its epochs, and images.

They are loaded on first use, checked against their hashes, and kept as long as consecutive requests need them.
"""

import hashlib
from collections.abc import Mapping, Sequence

from server.conversation.block import Blob
from server.conversation.epoch import Epoch, Segment
from server.conversation.image import find_image_header
from server.postgres.codec import decode_text
from server.postgres.engine import Database
from server.postgres.replay import call_rows
from server.postgres.rows import Row, segment_from
from server.replay.verify.recorded_calls import Flaw


class SharedParts:
    """The shared parts of one conversation."""

    def __init__(self, database: Database, row: Row) -> None:
        """`row`: the conversation's."""
        self._database = database
        self._row = row
        self._static: tuple[int, str] = (-1, "")
        """The last epoch, and its text."""
        self._segments: tuple[int, list[Segment]] = (-1, [])
        """The last generation, and its segments."""
        self._checked_epochs: set[int] = set()
        self._blobs: dict[str, Blob] = {}
        self._flaws: list[Flaw] = []

    def take_flaws(self) -> list[Flaw]:
        """Remove and return the flaws found since the last call."""
        flaws, self._flaws = self._flaws, []
        return flaws

    async def static_text(self, epoch: Epoch) -> str:
        """Return the base text and the segments, even if they do not match their hash."""
        if self._static[0] != epoch.number:
            segments = await self.load_segments(epoch)
            self._static = (epoch.number, epoch.base_text + "".join(segment.text for segment in segments))
        text = self._static[1]
        if epoch.number not in self._checked_epochs:
            self._checked_epochs.add(epoch.number)
            found = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            if found != epoch.static_hash.hex():
                note = "The static text does not match its hash."
                stored = epoch.static_hash.hex()
                self._flaws.append(Flaw(position=f"epoch {epoch.number}", note=note, stored=stored, found=found))
        return text

    async def load_blobs(self, images: Sequence[str]) -> Mapping[str, Blob]:
        """Return the images that exist, and drop all others from memory."""
        held = {image: self._blobs[image] for image in images if image in self._blobs}
        missing = [bytes.fromhex(image) for image in images if image not in held]
        if missing:
            rows = await self._database.run(call_rows.BLOBS, tenant=self._row["tenant_id"], hashes=missing)
            for row in rows:
                blob = Blob(sha256=row["sha256"], media_type=decode_text(row["media_type"]), data=row["data"])
                stored, found = blob.sha256.hex(), hashlib.sha256(blob.data).hexdigest()
                held[stored] = blob
                if found != stored:
                    note = "The image does not match its hash."
                    self._flaws.append(Flaw(position="image", note=note, stored=stored, found=found))
                    continue
                header = find_image_header(blob.data)
                if header is None or header.media_type != blob.media_type:
                    note = f"The image {stored} does not have its media type."
                    kind = None if header is None else header.media_type
                    self._flaws.append(Flaw(position="image", note=note, stored=blob.media_type, found=kind))
        self._blobs = held
        return held

    async def load_segments(self, epoch: Epoch) -> list[Segment]:
        """Load the segments of an epoch. They are read again if a compaction has added one meanwhile."""
        if not epoch.segment_count:
            return []
        generation, segments = self._segments
        if generation != epoch.generation or len(segments) < epoch.segment_count:
            rows = await self._database.run(
                call_rows.SEGMENTS, conversation=self._row["id"], generation=epoch.generation
            )
            segments = [segment_from(row, epoch.generation) for row in rows]
            self._segments = (epoch.generation, segments)
        return segments[: epoch.segment_count]
