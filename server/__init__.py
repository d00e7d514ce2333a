"""Strata: a stateful conversation server.

The modules at this level are the domain: words, ports, rules and work. Each sub-package is one outside thing
(Postgres, HTTP, the terminal), and `wiring` is the one place that knows them all.
"""

__version__ = "0.1.0"
