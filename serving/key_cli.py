"""`penstock key`: makes API keys and the lines that the file of keys has for them.

penstock key new --name search
penstock key hash --name search < key.txt
"""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline import InvalidArgument

from .options import fail
from .terminal import echo

key = typer.Typer(help="Make API keys for --api-keys.", no_args_is_help=True)

Name = Annotated[str, typer.Option(help="Name of the key in logs and counts.")]


@key.command()
def new(name: Name = "client") -> None:
    """Print the table of a fresh key for the file; the key itself goes to standard error, this once."""
    from .access import new_key

    made = new_key()
    echo(_table(name, made))
    echo(made, err=True)


@key.command(name="hash")
def hash_key(name: Name = "client") -> None:
    """Print the table of a key of your own, read from standard input: a list of processes would show an option."""
    echo(_table(name, typer.get_text_stream("stdin").readline().strip()))


def _table(name: str, made: str) -> str:
    """The table of the file. A name or key that cannot be ends the program with an error."""
    from pipeline.protocols.field_rules import InvalidRecord

    from .access import ApiKey, hash_of

    try:
        checked = ApiKey(name=name, hash=hash_of(made))
    except InvalidRecord as error:
        fail(InvalidArgument(str(error), field="--name"))
    except InvalidArgument as error:
        fail(error)
    return f'[[key]]\nname = "{checked.name}"\nhash = "{checked.hash}"'
