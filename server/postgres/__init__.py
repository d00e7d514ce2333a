"""Postgres: the durable side of Strata, with SQLAlchemy (tables, statements, migrations) and asyncpg (the driver).

The room owns the tables, all SQL, the connections, the migrations and the embedded server, and it implements the ports
of the domain. It is divided by the same subjects as the domain. It promises that a write that returned is durable, that
every wait for the database has a limit, and that an outage is always raised as `DatabaseUnavailable`.

Other rooms use these modules:

- `store`: `PostgresStore`, which implements the store port
- `engine`, `connections`: `Database`, the connection pool of a process; its options and single connections
- `replica`: reading from a replica
- `notifications`: LISTEN and NOTIFY between processes
- `migrations`: the revision of the schema, and migrations
- `partitions`, `distribution`: the conversion of large tables to hash partitions, and their distribution on Citus
- `access.key_ring`, `access.key_cache`: tenants and API keys, and their cache
- `access.admin_sessions`, `access.rate_limit`: sessions of operators, and rate limits
- `caching`: the register of explicit provider caches
- `compaction.candidates`, `compaction.lengths`: the conversations that can be compacted, and their typical length
- `inspection.inspector`: `PostgresInspector`, which implements the read-only views for operators
- `inspection.audit_log`, `inspection.saved_views`: the audit log, and saved views
- `inspection.overviews`: the alarms of compactions
- `inspection.search_index`: the index for the lists and the search of operators
- `archive.exporter`, `archive.importer`, `archive.fields`, `archive.seeder`: archives, and copies for seeding
- `replay.replays`, `replay.conversations`: replays, and the conversations that they write
- `replay.conversation_choice`, `replay.recorded_calls`: the conversations and calls that replays and verifications read
- `jobs`: daily maintenance
- `embedded.service`: the embedded Postgres
"""
