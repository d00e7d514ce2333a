"""What many requests of a conversation have in common: the static texts of its epochs, and images.

Read when it is first needed, proven by its hash when it is read, and held no longer than requests go on needing it.
"""

import hashlib
from collections.abc import Mapping, Sequence

from server.conversation.block import Blob
from server.conversation.epoch import Epoch, Segment
from server.conversation.image import find_image_header
from server.postgres.codec import decode_text
from server.postgres.engine import Database
from server.postgres.replay import call_rows as walk_rows
from server.postgres.rows import Row, segment_from
from server.replay.verify.call_walk import Flaw


class SharedParts:
    """Those of one conversation."""

    def __init__(self, database: Database, row: Row) -> None:
        """`row`: the conversation's."""
        self._database = database
        self._row = row
        self._static: tuple[int, str] = (-1, "")
        """The epoch whose text was made last, and its text."""
        self._segments: tuple[int, list[Segment]] = (-1, [])
        """Those of one generation."""
        self._proven: set[int] = set()
        self._blobs: dict[str, Blob] = {}
        self._flaws: list[Flaw] = []

    def take_flaws(self) -> list[Flaw]:
        """What was found to be wrong since this was asked last."""
        flaws, self._flaws = self._flaws, []
        return flaws

    async def static_text(self, epoch: Epoch) -> str:
        """Base and segments, also where they are not what their hash says."""
        if self._static[0] != epoch.number:
            segments = await self.load_segments(epoch)
            self._static = (epoch.number, epoch.base_text + "".join(segment.text for segment in segments))
        text = self._static[1]
        if epoch.number not in self._proven:
            self._proven.add(epoch.number)
            found = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            if found != epoch.static_hash.hex():
                note = "The static text, base and segments, is not what its hash says."
                stored = epoch.static_hash.hex()
                self._flaws.append(Flaw(place=f"epoch {epoch.number}", note=note, stored=stored, found=found))
        return text

    async def hold_blobs(self, images: Sequence[str]) -> Mapping[str, Blob]:
        """These images, as far as they are there, and no others from now on."""
        held = {image: self._blobs[image] for image in images if image in self._blobs}
        missing = [bytes.fromhex(image) for image in images if image not in held]
        if missing:
            rows = await self._database.run(walk_rows.BLOBS, tenant=self._row["tenant_id"], hashes=missing)
            for row in rows:
                blob = Blob(sha256=row["sha256"], media_type=decode_text(row["media_type"]), data=row["data"])
                stored, found = blob.sha256.hex(), hashlib.sha256(blob.data).hexdigest()
                held[stored] = blob
                if found != stored:
                    note = "The image is not what its hash says."
                    self._flaws.append(Flaw(place="image", note=note, stored=stored, found=found))
                    continue
                header = find_image_header(blob.data)
                if header is None or header.media_type != blob.media_type:
                    note = f"The image {stored} is not of the kind that it is said to be."
                    kind = None if header is None else header.media_type
                    self._flaws.append(Flaw(place="image", note=note, stored=blob.media_type, found=kind))
        self._blobs = held
        return held

    async def load_segments(self, epoch: Epoch) -> list[Segment]:
        """Those of a generation are read at once; a compaction meanwhile may have added one."""
        if not epoch.segment_count:
            return []
        generation, segments = self._segments
        if generation != epoch.generation or len(segments) < epoch.segment_count:
            rows = await self._database.run(
                walk_rows.SEGMENTS, conversation=self._row["id"], generation=epoch.generation
            )
            segments = [segment_from(row, epoch.generation) for row in rows]
            self._segments = (epoch.generation, segments)
        return segments[: epoch.segment_count]
