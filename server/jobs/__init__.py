"""Background work on pgqueuer, a job queue in Postgres.

`Job` (in `job`) is a kind of work. `queue` sends and runs jobs, and is the only module besides `worker` that uses
pgqueuer. `worker` keeps a queue running while connections come and go. The other modules each build jobs: `compaction`,
`indexing`, `replay`, `retention`. A job runs at least once, so it must be safe to repeat.
"""
