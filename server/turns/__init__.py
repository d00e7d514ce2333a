"""Taking turns: the use case that everything else is for.

`service` accepts an input and runs its turn in a task of this process, `runner` takes it from the accepted input to the
durable answer, `keeper` checkpoints it, `queue` lets turns wait, `live` and `stored` are how a turn is read, `reaper`
ends turns whose process has died. A turn always ends, and its answer is durable before its terminal event leaves.
"""
