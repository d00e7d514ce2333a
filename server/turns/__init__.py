"""Taking turns: from an accepted input to a durable answer.

The room owns the use case `take_turn`, the task that runs a turn, its checkpoints and lease, the queue of waiting
turns, reading a turn while it runs and afterwards, and the recovery of turns whose process died. It promises that
every turn ends, and that its answer is durable before its terminal event is sent.

Other rooms use these modules:

- `service`: `TurnService`, which accepts an input, runs its turn in a task of this process, and cancels and reads turns
- `request`: `TurnRequest`, the input of a turn
- `handle`: `TurnHandle`, an accepted turn, and `EventReader`, the reader of its events
- `runner`: `TurnRunner`, which takes a turn from its accepted input to its end; replays use it with their own rules
- `running`: `RunningTurns`, the turns that run in this process
- `live`: `LiveTurn`, the events of a running turn
- `stored`: the events of a stored turn, folded from its bytes
- `recovery`: `TurnRecovery`, which ends the turns of dead processes
- `observer`: the port for metrics and spans of turns
- `tools`: `TurnTools` and `TurnLimits`, what the modules of a turn share
"""
