"""Exit codes of commands by class of error.

The codes follow sysexits.h, so that scripts and service managers can distinguish temporary from permanent errors.
"""

from typing import Final

from server.conversation.errors import (
    AddressInUse,
    Conflict,
    DataDirectoryForbidden,
    DiskFull,
    EmbeddedStartFailed,
    Internal,
    Invalid,
    MigrationFailed,
    NotFound,
    ProviderFailed,
    Refused,
    SchemaAhead,
    SchemaBehind,
    Setup,
    StrataError,
    Unavailable,
)

EXIT_CODES: Final[dict[type[StrataError], int]] = {
    Invalid: 65,
    NotFound: 66,
    Conflict: 65,
    Refused: 77,
    Unavailable: 69,
    SchemaBehind: 76,
    SchemaAhead: 76,
    Setup: 78,
    DataDirectoryForbidden: 77,
    DiskFull: 74,
    EmbeddedStartFailed: 71,
    AddressInUse: 71,
    MigrationFailed: 70,
    ProviderFailed: 69,
    Internal: 70,
}
"""The nearest parent class applies. 0 is success, 1 is a check that found something, 2 is a usage error."""


def exit_code_of(kind: type[StrataError]) -> int:
    """Return the exit code for a class of errors."""
    return next(EXIT_CODES[parent] for parent in kind.__mro__ if parent in EXIT_CODES)
