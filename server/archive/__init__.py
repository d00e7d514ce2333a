"""Archives: conversations as files, and plans of synthetic conversations for seeding a database.

The room owns the file format of exported conversations. It promises that a conversation that is exported and imported
again is the same to the byte, and that a file that was truncated or altered is detected before its conversation is
committed. Reading and writing the tables is in `server.postgres.archive`.

Other rooms use these modules:

- `file`: the format, `ArchiveWriter`, `read_archive`, and the result of an import
- `values`: how the values of columns are written and read
- `seed_plan`: the assistants and conversations that `strata seed` creates
"""
