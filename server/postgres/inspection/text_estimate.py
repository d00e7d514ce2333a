"""Whether an index should be asked for words, by the planner's statistics: no row is read to know it.

An index reads all entries of the rarest of the words before it gives its first row. Where there are very many, a list
is found faster by looking at the newest conversations one by one.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from server.postgres.engine import Database, Statement
from server.postgres.rows import Row

MANY: Final = 4000
"""Where the planner expects more rows than this, an index is not asked."""
ENTRIES: Final = 50_000
"""Nor where even the rarest word has more entries: they are read before the other words rule them out."""
_WORDS: Final = 8
_WORD: Final = re.compile(r"(-?)(\w+)")

_ESTIMATE: Final = Statement("""
EXPLAIN (FORMAT JSON) SELECT FROM turn_texts
WHERE tsv @@ (websearch_to_tsquery('simple', :words) && plainto_tsquery('simple', :phrase)
    && CASE WHEN :tenant_word::text IS NULL THEN ''::tsquery ELSE ('''' || :tenant_word || '''')::tsquery END)
""")


async def are_rare(database: Database, words: str, phrase: str, tenant_word: str | None) -> bool:
    """Whether an index has few enough of them, as far as the planner knows."""
    if await _estimate(database, words, phrase, tenant_word) > MANY:
        return False
    required = list_required(words, phrase)
    for word in required:
        if await _estimate(database, "", word, tenant_word) <= ENTRIES:
            return True
    return not required


def list_required(words: str, phrase: str) -> Sequence[str]:
    """Words that a text must have, the longest first: they are the rarest as a rule. None where there are choices."""
    found = [word for minus, word in _WORD.findall(words) if not minus]
    if any(word.lower() == "or" for word in found):
        found = []
    return sorted({*found, *(word for _, word in _WORD.findall(phrase))}, key=len, reverse=True)[:_WORDS]


def planned_rows(rows: Sequence[Row]) -> int:
    """What an EXPLAIN expects."""
    plan: dict[str, Any] = json.loads(rows[0][0])[0]["Plan"]
    return int(plan["Plan Rows"])


async def _estimate(database: Database, words: str, phrase: str, tenant_word: str | None) -> int:
    return planned_rows(await database.run(_ESTIMATE, words=words, phrase=phrase, tenant_word=tenant_word))
