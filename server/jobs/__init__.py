"""Background jobs on pgqueuer, a job queue in Postgres.

The room owns the queue, the worker and the kinds of jobs. It promises that a queued job runs at least once, also if a
worker dies or loses its database; a job must therefore be safe to repeat. `queue` and `worker` are the only modules
that use pgqueuer.

Other rooms use these modules:

- `job`: `Job`, a kind of work
- `queue`: `JobSender`, which queues jobs
- `worker`: `Worker`, which runs jobs until it is stopped
- `compaction`, `indexing`, `replay`, `retention`: each builds jobs of one kind
"""
