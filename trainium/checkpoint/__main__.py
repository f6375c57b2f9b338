"""`python -m trainium.checkpoint to-nxd | to-hf | verify | verify-nxd`: what the convert and export jobs run."""

import sys
from collections.abc import Sequence

import typer

from trainium.checkpoint import commands
from trainium.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command("to-nxd")(commands.to_nxd)
app.command("to-hf")(commands.to_hf)
app.command("verify")(commands.verify)
app.command("verify-nxd")(commands.verify_nxd)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 when a verification found differences, or 2 with one message when the input is at fault."""
    try:
        app(argv, prog_name="python -m trainium.checkpoint")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
