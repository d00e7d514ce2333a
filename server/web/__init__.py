"""HTTP: the JSON API, the pages for operators, and the Python client.

The room owns everything that knows Litestar, statuses, headers, bodies and cookies. Handlers decode a request, call one
operation of a lower room and encode its result; they contain no rules of the domain and no SQL. It promises that every
answer has a request id, that every error is a problem (RFC 9457) with a code of `conversation.errors`, and that every
route under `/v1` and `/admin` has a guard.

Other rooms use these modules:

- `app`: `build_app` with `WebParts`, and `list_routes` for the reference page
- `client`: the Python client for programs that call a Strata server
- `api.call_views`, `api.inspection_views`: calls, lists and timelines as JSON, which the terminal also prints
- `api.replay_bodies`: the body of a new replay
- `errors`, `problem`, `json_text`: the status of each error code, its answer, and the JSON encoding
- `middleware`, `body_budget`, `forwarded`: what `server.app` configures: the outermost ASGI application, the limit of
  request bodies, and trusted proxies
- `asgi_extensions`: names of ASGI extensions that the HTTP server offers

Inside, `api/` has the routes of clients (`/v1`) and of operators (`/admin/api`), and `admin/` has the pages. The other
modules are shared by both.
"""
