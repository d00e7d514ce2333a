"""Background work on pgqueuer, a job queue in Postgres: what `strata worker` does.

`job` says what a job is, `retention` is one, `queue` is where pgqueuer begins, `worker` keeps it running.
"""
