"""The JSON API: routes under `/v1` for clients and under `/admin/api` for operators.

One module per subject, with its routes and the models of its bodies and views. A `...Body` is decoded strictly, and
unknown members are refused. A `...View` is a part of an answer, read from the attributes of a value of the domain.
Members, paths and error codes are public and documented in the OpenAPI document (`/schema`) and in
docs/guides/http-api.md. `web.app` registers the routes; `web.sse` and `web.admin` reuse the views.
"""
