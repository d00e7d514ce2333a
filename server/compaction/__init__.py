"""Compaction: moving old exchanges out of the buffer, as segments or summaries, and undoing it.

The room decides when to compact (`plan`, from the numbers in `state` and `carrying_cost`), carries a decision out
(`compactor`) and checks after every turn whether one is due (`watch`). A compaction never changes what was sent before:
it only appends to the static text, or starts a new generation of segments. It is one statement that takes effect
completely or not at all, so a crash leaves the old epoch or the new one.

Other rooms use these modules:

- `compactor`: `Compactor`, which compacts a conversation and undoes a compaction
- `plan`: the reasons for and against a compaction
- `report`: `CompactionReport`, and `CompactionObserver`, the port for metrics and logs
- `summary`, `signed_summary`: the requests for summaries, which are rebuilt by inspection
- `background_call`: provider calls that belong to no turn
- `typical_lengths`: how long the conversations of an assistant usually get
- `watch`: `CompactionWatch`, which queues conversations after a turn
- `simulation`: what conversations would cost under each policy

`state`, `carrying_cost`, `epoch_writer` and `history_rewriter` are internal.
"""
