"""Explicit caches (`cachedContents`) and the implicit cache.

An explicit cache is created by one account for one model and is removed when it expires. An expired, deleted or foreign
name gets the same error, so that existence is not disclosed.

The implicit cache reads a prefix that a request shares with an earlier one. The real cache is best-effort; this one
always hits when it may, so that a client's prefix stability can be measured. It stores prefixes up to each part, per
model and account, for five minutes after their last use.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

from server.emulator.gemini.errors import ApiError, invalid, model_unknown
from server.emulator.gemini.models import Model, find_model
from server.emulator.gemini.prompt import Prompt, read_prompt
from server.emulator.gemini.turn_order import check_shape
from server.emulator.state import Clock, EmulatorState

_LIFETIME_SECONDS: Final = 300.0
_DEFAULT_SECONDS: Final = 3_600.0
_TTL: Final = re.compile(r"(\d+(?:\.\d{1,9})?)s")
_UPDATABLE: Final = frozenset({"ttl", "expire_time", "name", "model"})
_DEFAULT_PAGE_SIZE: Final = 50
_CONFLICT: Final = (
    "CachedContent can not be used with GenerateContent request setting system_instruction, tools or tool_config."
    " Proposed fix: move those values to CachedContent from GenerateContent request."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitCache:
    name: str
    account: str
    display_name: str
    prompt: Prompt
    tokens: int
    created_at: float
    updated_at: float
    expires_at: float

    def render(self) -> dict[str, Any]:
        shown = {
            "name": self.name,
            "model": f"models/{self.prompt.model.id}",
            "createTime": _timestamp(self.created_at),
            "updateTime": _timestamp(self.updated_at),
            "expireTime": _timestamp(self.expires_at),
            "usageMetadata": {"totalTokenCount": self.tokens},
        }
        return {**shown, "displayName": self.display_name} if self.display_name else shown


class ExplicitCaches:
    def __init__(self, state: EmulatorState) -> None:
        self._clock = state.clock
        self._seed = state.seed
        self._numbers = count(1)
        self._caches: dict[str, ExplicitCache] = {}

    def create(self, body: Mapping[str, Any], account: str, version: str) -> ExplicitCache:
        """Create a cache. Raises `ApiError` if the model is unknown, has no explicit caches, or the content is too
        small.
        """
        model, minimum = _read_model(str(body.get("model", "")), version)
        if "contents" in body:
            check_shape(body["contents"], "CreateCachedContentRequest.cached_content")
        prompt = read_prompt(body, model)
        tokens = prompt.count()
        if tokens < minimum:
            raise invalid(f"Cached content is too small. total_token_count={tokens}, min_total_token_count={minimum}")
        now = self._clock()
        cache = ExplicitCache(
            name=f"cachedContents/{self._new_id()}",
            account=account,
            display_name=body.get("display_name", ""),
            prompt=prompt,
            tokens=tokens,
            created_at=now,
            updated_at=now,
            expires_at=_read_expiry(body, now),
        )
        self._caches[cache.name] = cache
        return cache

    def load(self, name: str, account: str) -> ExplicitCache:
        """Load a cache. Raises `ApiError` (403) if this account has no live cache of that name."""
        cache = self._caches.get(name)
        if cache is None or cache.account != account or cache.expires_at <= self._clock():
            raise ApiError(403, "CachedContent not found (or permission denied)")
        return cache

    def list(self, account: str, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the account's live caches, oldest first."""
        now = self._clock()
        mine = [cache for cache in self._caches.values() if cache.account == account and cache.expires_at > now]
        start, size = (_read_number(query, name) for name in ("pageToken", "pageSize"))
        end = start + (size or _DEFAULT_PAGE_SIZE)
        page: dict[str, Any] = {}
        if mine[start:end]:
            page["cachedContents"] = [cache.render() for cache in mine[start:end]]
        if end < len(mine):
            page["nextPageToken"] = str(end)
        return page

    def update(self, name: str, body: Mapping[str, Any], account: str) -> ExplicitCache:
        """Change the time of expiry; nothing else can be changed. Raises `ApiError`."""
        cache = self.load(name, account)
        stray = sorted(set(body) - _UPDATABLE)
        if stray or not {"ttl", "expire_time"} & set(body):
            raise invalid("* UpdateCachedContentRequest.cached_content: only ttl and expire_time can be updated\n")
        now = self._clock()
        updated = replace(cache, updated_at=now, expires_at=_read_expiry(body, now))
        self._caches[name] = updated
        return updated

    def delete(self, name: str, account: str) -> None:
        """Delete a cache. Raises `ApiError` (403)."""
        del self._caches[self.load(name, account).name]

    def _new_id(self) -> str:
        return hashlib.sha256(f"cache {self._seed} {next(self._numbers)}".encode()).hexdigest()[:24]


def extend(cache: ExplicitCache, body: Mapping[str, Any], model: Model) -> Prompt:
    """The prompt of a request that uses a cache. Raises `ApiError` if the two do not fit."""
    if {"system_instruction", "tools", "tool_config"} & set(body):
        raise invalid(_CONFLICT)
    if cache.prompt.model.id != model.id:
        raise invalid(
            f"Model used by GenerateContent request (models/{model.id}) and CachedContent"
            f" (models/{cache.prompt.model.id}) has to be the same."
        )
    return replace(cache.prompt, contents=[*cache.prompt.contents, *body.get("contents", ())])


def _read_model(name: str, version: str) -> tuple[Model, int]:
    """The model and the minimum tokens of its caches."""
    if not name:
        raise invalid("* CreateCachedContentRequest.model: unexpected model name format\n")
    model = find_model(name.removeprefix("models/"), version)
    if model is None:
        raise model_unknown(name.removeprefix("models/"), version, "createCachedContent")
    if model.explicit_minimum_tokens is None:
        raise invalid(f"Explicit caching is not supported for models/{model.id}.")
    return model, model.explicit_minimum_tokens


def _read_expiry(body: Mapping[str, Any], now: float) -> float:
    if "expire_time" in body:
        try:
            expires_at = datetime.fromisoformat(body["expire_time"])
        except ValueError:
            raise invalid(
                f"Invalid value at 'cached_content.expire_time' (type.googleapis.com/google.protobuf.Timestamp),"
                f" Field 'expireTime', Illegal timestamp format; \"{body['expire_time']}\""
            ) from None
        moment = expires_at.replace(tzinfo=expires_at.tzinfo or UTC).timestamp()
    else:
        moment = now + _read_ttl(str(body.get("ttl", f"{_DEFAULT_SECONDS}s")))
    if moment <= now:
        raise invalid("* CachedContent.expiration: expire_time must be in the future\n")
    return moment


def _read_ttl(text: str) -> float:
    match = _TTL.fullmatch(text)
    if match is None:
        raise invalid(
            f"Invalid value at 'cached_content.ttl' (type.googleapis.com/google.protobuf.Duration), Field 'ttl',"
            f" Illegal duration format; duration must end with 's' \"{text}\""
        )
    return float(match[1])


def _read_number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class ImplicitCache:
    def __init__(self, clock: Clock, *, enabled: bool = True) -> None:
        self._clock = clock
        self._enabled = enabled
        self._expiries: OrderedDict[bytes, float] = OrderedDict()

    def read_and_fill(self, prompt: Prompt, account: str) -> int:
        """The cached tokens of this prompt, 0 below the model's minimum; then store its prefixes."""
        if not self._enabled:
            return 0
        now = self._clock()
        self._forget(now)
        digest = hashlib.sha256(f"{prompt.model.id} {account}".encode()).digest()
        tokens = cached = 0
        for block, size in prompt.blocks():
            digest = hashlib.sha256(digest + block.encode()).digest()
            tokens += size
            if digest in self._expiries:
                cached = tokens
            self._expiries[digest] = now + _LIFETIME_SECONDS
            self._expiries.move_to_end(digest)
        return cached if cached >= prompt.model.implicit_minimum_tokens else 0

    def _forget(self, now: float) -> None:
        while self._expiries and next(iter(self._expiries.values())) <= now:
            self._expiries.popitem(last=False)
