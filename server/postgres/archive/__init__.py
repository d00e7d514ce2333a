"""Export, import and copies of conversations on Postgres."""
