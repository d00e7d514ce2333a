"""The JSON API: routes under `/v1` for clients and under `/admin/api` for operators.

One module per subject, with its routes and the models of its bodies and views. A `...Body` is decoded strictly and
unknown members are refused; a `...View` is what is answered. Members, paths and error codes are public and documented
in the OpenAPI document (`/schema`) and in docs/guides/http-api.md. Public surface: the route handlers, which `web.app`
registers, and the views, which `web.sse` and `web.admin` reuse.
"""
