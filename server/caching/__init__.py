"""Provider caches: where breakpoints stand, whether an explicit cache pays, and what a call should read from the cache.

`policy` places breakpoints, `explicit_policy` decides about explicit caches and `keeper` carries it out, `expectation`
compares what was expected with what the provider reported, `carrying_cost` has the sums behind the compactor.
"""
