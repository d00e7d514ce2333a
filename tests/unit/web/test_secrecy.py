"""Neither content nor secrets appear in logs, metrics or errors, for any request of a client."""

import logging
from io import StringIO

import httpx2
import pytest

from server.conversation.errors import DatabaseUnavailable
from tests.support.fakes.log_capture import capture_log
from tests.support.fakes.site import Site

MARKER = "purple-elephant-content"


async def everything(site: Site, key: str) -> list[httpx2.Response]:
    """Requests with the key and the marker in every possible place."""
    bearer = {"authorization": f"Bearer {key}"}
    sneaky = {**bearer, "x-api-key": key, "cookie": f"session={key}", "user-agent": MARKER, "referer": MARKER}
    return [
        await site.get(f"/v1/key?api_key={key}&q={MARKER}", headers=sneaky),
        await site.get(f"/{MARKER}/{key}", headers=sneaky),
        await site.get(f"/admin/api/keys/{key}", headers=sneaky),
        await site.get(f"/admin/api/keys/{MARKER}", key=site.admin_key),
        await site.get(f"/test/pages?limit={MARKER}", headers=sneaky),
        await site.get(f"/test/crash?q={MARKER}", headers=sneaky),
        await site.client.post("/test/turns", json={"input": [{"type": MARKER, "text": key}]}, headers=sneaky),
        await site.client.post("/test/turns", json={"input": [MARKER, key]}, headers=sneaky),
        await site.client.post("/test/turns", content=f'{{"input": "{MARKER}{key}'.encode(), headers=sneaky),
        await site.client.post("/test/turns", content=MARKER * 400, headers=sneaky),
        await site.client.put(f"/healthz?{MARKER}", content=key, headers=sneaky),
        await site.client.post("/test/turns", data={"input": MARKER}, headers=bearer),
    ]


async def test_neither_content_nor_a_key_is_exposed(site: Site) -> None:
    answers = await everything(site, site.client_key)
    assert [answer.status_code for answer in answers] == [200, 404, 403, 404, 422, 500, 422, 422, 400, 413, 405, 415]
    metrics = (await site.get("/metrics")).text
    secret = site.client_key.split("_")[2]
    for name, text in {
        "log": site.log.getvalue(),
        "metrics": metrics,
        **{str(answer.request.url): answer.text + str(answer.headers) for answer in answers},
    }.items():
        assert secret not in text, name
        assert MARKER not in text, name
    assert "http.request_failed" in site.log.getvalue()


async def test_the_pretty_log_contains_no_more(site: Site) -> None:
    with capture_log(log_format="pretty") as log:
        await everything(site, site.client_key)
    assert "http.request_failed" in log.getvalue()
    assert MARKER not in log.getvalue()
    assert site.client_key.split("_")[2] not in log.getvalue()


async def test_a_reason_with_a_password_is_redacted_in_the_log(captured_log: StringIO) -> None:
    logging.getLogger("strata.test").warning(
        "database.lost", exc_info=DatabaseUnavailable("postgresql://strata:hunter2@db:5432 does not answer.")
    )
    assert "hunter2" not in captured_log.getvalue()
    assert "postgresql://strata:[redacted]@db:5432" in captured_log.getvalue()


@pytest.mark.parametrize("noisy", ["httpx2", "httpcore2.http11", "sqlalchemy.engine.Engine", "asyncio", "google_genai"])
def test_libraries_are_logged_from_warning_upwards(captured_log: StringIO, noisy: str) -> None:
    logging.getLogger(noisy).debug("authorization: %s", MARKER)
    logging.getLogger(noisy).info("POST https://x.example/?key=%s", MARKER)
    assert captured_log.getvalue() == ""
    logging.getLogger(noisy).warning("slow")
    assert "slow" in captured_log.getvalue()
