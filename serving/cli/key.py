"""`penstock key`: makes API keys and the lines that the file of keys has for them.

penstock key new --name search
penstock key hash --name search < key.txt
"""

from __future__ import annotations

import sys

from cyclopts import App

from pipeline import InvalidArgument

from ..terminal import echo
from .commands import command
from .options import KeyOptions

keys = App(name="key", help="Make API keys for --api-keys.")


@command(keys)
def new(key: KeyOptions) -> None:
    """Print the table of a fresh key for the file; the key itself goes to standard error, this once."""
    from ..access import new_key

    made = new_key()
    echo(_table(key.name, made))
    echo(made, err=True)


@command(keys, "hash")
def hash_key(key: KeyOptions) -> None:
    """Print the table of a key of your own, read from standard input: a list of processes would show an option."""
    echo(_table(key.name, sys.stdin.readline().strip()))


def _table(name: str, made: str) -> str:
    """Return the table for the file. Raise InvalidArgument for a name or key that cannot be."""
    from pipeline.protocols.field_rules import InvalidRecord

    from ..access import ApiKey, hash_of

    try:
        checked = ApiKey(name=name, hash=hash_of(made))
    except InvalidRecord as error:
        raise InvalidArgument(str(error), field="name") from error
    return f'[[key]]\nname = "{checked.name}"\nhash = "{checked.hash}"'
