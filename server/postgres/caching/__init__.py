"""The register of explicit provider caches on Postgres."""
