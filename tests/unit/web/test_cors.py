from tests.support.fakes.site import Site, open_site

ORIGIN = "https://app.example"


async def preflight(site: Site, origin: str, header: str = "authorization") -> tuple[int, dict[str, str]]:
    answer = await site.client.options(
        "/v1/key",
        headers={"origin": origin, "access-control-request-method": "GET", "access-control-request-headers": header},
    )
    return answer.status_code, dict(answer.headers)


async def test_it_is_off_by_default(site: Site) -> None:
    _, headers = await preflight(site, ORIGIN)
    answer = await site.get("/v1/key", headers={"origin": ORIGIN})
    assert not [name for name in {**headers, **answer.headers} if name.startswith("access-control-")]


async def test_a_listed_origin_is_allowed() -> None:
    async with open_site(cors_origins=[ORIGIN]) as site:
        for header in ("authorization", "content-type", "idempotency-key", "if-match", "last-event-id", "prefer"):
            status, headers = await preflight(site, ORIGIN, header)
            assert (status, headers["access-control-allow-origin"]) == (204, ORIGIN)
            assert header in headers["access-control-allow-headers"]
        assert {"GET", "POST", "PUT", "PATCH", "DELETE"} <= set(headers["access-control-allow-methods"].split(", "))
        assert headers["x-content-type-options"] == "nosniff"
        for path, status in (("/v1/key", 401), ("/nowhere", 404), ("/healthz", 200)):
            answer = await site.get(path, headers={"origin": ORIGIN})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            exposed = set(answer.headers["access-control-expose-headers"].split(", "))
            assert {"etag", "idempotency-replayed", "location", "retry-after", "x-request-id"} <= exposed
            assert "access-control-allow-credentials" not in answer.headers
            assert "origin" in answer.headers["vary"].lower()


async def test_no_other_origin_is_allowed() -> None:
    async with open_site(cors_origins=[ORIGIN]) as site:
        for origin in ("https://evil.example", f"{ORIGIN}.evil.example", "https://appXexample", "null"):
            status, headers = await preflight(site, origin)
            assert status == 400
            assert "access-control-allow-origin" not in headers
            answer = await site.get("/healthz", headers={"origin": origin})
            assert "access-control-allow-origin" not in answer.headers
        assert (await preflight(site, ORIGIN, "x-other"))[0] == 400
