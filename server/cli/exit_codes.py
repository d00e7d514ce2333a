"""How a command ends when something is wrong: the exit code says which kind.

The codes follow sysexits.h where it has one, so that scripts and service managers can tell "try again" from "call
somebody".
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
"""By the nearest class of the tree. 0 is success, 1 a check that found something, 2 a wrong command line."""


def exit_code_of(kind: type[StrataError]) -> int:
    """The exit code for a kind of error."""
    return next(EXIT_CODES[parent] for parent in kind.__mro__ if parent in EXIT_CODES)
