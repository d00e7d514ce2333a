"""HTTP: Litestar routes over the ports, and the edge that every request passes.

`app` assembles; `edge` is the one middleware; `errors` is the only place that knows statuses; `auth` is the lock on
every route under `/v1` and `/admin`. Handlers translate between bodies and the domain and decide nothing.
"""
