"""A command with subcommands, one per module of a package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import commands
from models.commands import distributed


def run_one(flags: commands.Parser, package: str, modules: Mapping[str, Any], arguments: list[str] | None) -> int:
    """Run the module that the first argument of ``python -m package`` names, and return the exit code.

    Args:
        flags: the package's parser, which gets the subcommands.
        modules: by the names of the subcommands; each has a docstring, ``add_flags`` and ``command``, and may have
            ``EXAMPLES`` for the end of its help. A text is the help of one that is not imported.
        arguments: by default those of the command line.
    """
    names = flags.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in modules.items():
        if isinstance(module, str):
            names.add_parser(name, help=module)
            continue
        summary = str(module.__doc__).splitlines()[0]
        examples = getattr(module, "EXAMPLES", "").replace(f"python -m {package}", flags.prog)
        made = names.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=commands.epilog(examples),
            formatter_class=flags.formatter_class,
        )
        module.add_flags(made)
    chosen = flags.parse_args(arguments)
    commands.keep_compiled(vars(chosen).pop("compilation_cache"))

    def command() -> None:
        commands.check_extras(arguments)
        if "coordinator" in chosen:
            distributed.join(chosen)
        modules[chosen.name].command(chosen)

    return commands.run(command, f"{package} {chosen.name}")
