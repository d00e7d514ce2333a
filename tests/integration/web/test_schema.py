"""For requests within and outside of the OpenAPI document, no response is a 5xx, and all match their schema."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conftest import StrataServer
from tests.integration.web.test_conversations import picture_of
from tests.support.http_driver import ApiClient, open_api

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
EXAMPLES = 10


async def known_ids(api: ApiClient) -> dict[str, Any]:
    """Existing objects, so that requests get further than to a 404."""
    conversation, sha256 = await picture_of(api)
    shown = await api.expect(200, "GET", f"/v1/conversations/{conversation}")
    return {"conversation_id": conversation, "assistant_id": shown["assistant_id"], "sha256": sha256, "seq": 2}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
async def test_every_answer_is_as_documented(strata_server: StrataServer, mode: GenerationMode) -> None:
    async with open_api(strata_server) as api:
        document = await api.expect(200, "GET", "/schema")
        known = await known_ids(api)
    found = schemathesis.openapi.from_dict(document).get_all_operations()
    operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
    assert len(operations) == 68
    tried = 0
    for operation in operations:
        key = strata_server.admin_key if operation.path.startswith("/admin") else strata_server.client_key
        strategy = operation.as_strategy(generation_mode=mode)
        # An operation without parameters has no invalid requests.
        with suppress(Unsatisfiable):
            await asyncio.to_thread(try_operation, strategy, strata_server.url, key, known)
            tried += 1
    assert tried >= (len(operations) if mode is GenerationMode.POSITIVE else 10)


def try_operation(strategy: st.SearchStrategy[Any], url: str, key: str, known: dict[str, Any]) -> None:
    """Many requests to one operation."""

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy, real=st.booleans())
    def try_one(*, case: Any, real: bool) -> None:
        if real:
            case.path_parameters = {name: known.get(name, value) for name, value in case.path_parameters.items()}
        response = case.call(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30)
        # A stream is documented as a text; schemathesis would compare its single events with that.
        is_stream = any(kind.startswith("text/event-stream") for kind in response.headers.get("content-type", ()))
        case.validate_response(
            response, checks=[check for check in CHECKS if not is_stream or check is not response_schema_conformance]
        )

    try_one()
