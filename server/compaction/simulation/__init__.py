"""Simulation of compaction policies: what conversations would cost, without calling a provider.

Simulated conversations are played against a simulated provider, with the planner that the server uses (`comparison`),
and compared with the cheapest compactions that are possible in hindsight (`optimum`). `strata simulate` runs it, and
`grid` is the documented set of models, conversation shapes and lengths.
"""
