"""`penstock key`: makes API keys and the lines that the file of keys has for them.

penstock key new --name search
penstock key hash --name search < key.txt
"""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline import InvalidArgument

from .options import fail, says_its_options
from .terminal import echo

key = typer.Typer(help="Make API keys for --api-keys.", no_args_is_help=True)

Name = Annotated[str, typer.Option(help="Name of the key in logs and counts.")]


@key.command()
@says_its_options
def new(name: Name = "client") -> None:
    """Print a fresh key, which is shown this once, and its table for the file of keys."""
    from .access import new_key

    made = new_key()
    echo(f"# For the client, shown this once: {made}")
    echo(_table(name, made))


@key.command(name="hash")
@says_its_options
def hash_key(name: Name = "client") -> None:
    """Print the table for a key of your own, read from standard input so that no list of processes shows it."""
    echo(_table(name, typer.get_text_stream("stdin").readline().strip()))


def _table(name: str, made: str) -> str:
    """The table of the file. A name or key that cannot be ends the program with an error."""
    from pipeline.protocols.wire import InvalidRecord

    from .access import ApiKey, hash_of

    try:
        checked = ApiKey(name=name, hash=hash_of(made))
    except InvalidRecord as error:
        fail(InvalidArgument(str(error), field=error.field))
    except InvalidArgument as error:
        fail(error)
    return f'[[key]]\nname = "{checked.name}"\nhash = "{checked.hash}"'
