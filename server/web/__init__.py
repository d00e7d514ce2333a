"""HTTP: the JSON API, the pages for operators, and the Python client.

Owns everything that knows Litestar, statuses, headers, bodies and cookies. Handlers decode a request, call one
operation of a lower room and encode its result; they contain no rules of the domain and no SQL. Every answer has a
request id, every error is a problem (RFC 9457) with a code of `conversation.errors`, and every route under `/v1` and
`/admin` has a guard.

Public surface: `app.build_app` with `WebParts` for `server.app`, and `server.web.client` for programs that call a
Strata server. Inside, `api/` has the JSON routes of clients (`/v1`) and of operators (`/admin/api`), `admin/` the
pages; the modules here are shared by both: `middleware`, `auth`, `errors`, `sse`, `body`, `headers`, `openapi`,
`operations`.
"""
