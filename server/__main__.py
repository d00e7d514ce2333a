"""`python -m server` is `strata`."""

from server.cli import main

main()
