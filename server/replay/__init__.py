"""Replay of stored conversations: offline verification, and reruns through a candidate.

The room owns two packages. `verify` parses every stored answer again from its raw bytes, rebuilds every request, and
compares both with the store. It calls no provider and writes nothing. `rerun` sends the inputs of stored conversations
to a candidate (another model, prompt or setting), compares the answers with the recorded ones, and reports the result.
It never writes to live conversations, never exceeds the budget of a replay but by the error of its estimates, and never
requests an answer again that was stored.

Other rooms use these modules:

- `verify.verifier`: `Verifier`, which verifies conversations
- `verify.verification`: the result of a verification: counts and mismatches
- `verify.recorded_calls`: the port that stored calls are read through
- `verify.epoch_check`: checks of epochs, used by the implementation of that port
- `rerun.replay`, `rerun.result`, `rerun.report`: the values: replays and their items, results, and reports
- `rerun.port`: the port that stores replays, and decides which item runs and which call is sent next
- `rerun.service`: `ReplayService`, which plans, creates and continues replays
- `rerun.items`: `ReplayItems`, which runs items
- `rerun.calls`: `ReplayCalls`, which inspects replay conversations and their calls
- `rerun.observer`: the port for metrics and logs
- `rerun.budget`, `rerun.estimate`, `rerun.validation`: decisions that the implementation of the port applies
- `rerun.assertions`, `rerun.assertion_evaluation`: the port that assertions are evaluated through, and their evaluation
- `rerun.json_codec`: values as JSON, as they are stored and as clients see them
- `rerun.full_results`, `rerun.comparison`, `rerun.similarity`, `rerun.figures`: results with their answers, the
  differences of two answers, and figures as text
- `rerun.export`: results as files
"""
