"""Provider caches: where to place breakpoints, whether an explicit cache pays off, and what a call should read from the
cache.

The room decides purely; only `maintainer` calls providers, in the background and never as part of a turn. It promises
that explicit caches stay within the budget for storage, and that every cache is registered before it is created, so
that none is left behind at a provider.

Other rooms use these modules:

- `policy`: breakpoints and lifetimes of a request, and how they are stored with the call
- `expectation`: the expected cache read of a call, and the reason if less was read
- `explicit_policy`: the settings of explicit caches, and `CachePlan`, the decision for one payload
- `maintainer`: `CacheMaintainer`, which creates, renews and deletes explicit caches
"""
