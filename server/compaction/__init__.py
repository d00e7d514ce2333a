"""The compactor: what to move out of the buffer and when, segments, summaries, and simulations of the policies.

`planner` decides purely, `compactor` carries it out with one statement per epoch, `watch` asks after every turn. What
was sent before stays as it was: a compaction only appends to the static text, or starts a new generation.
"""
