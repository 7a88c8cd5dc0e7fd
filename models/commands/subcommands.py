"""A command with subcommands, one per module of a package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.commands import distributed
from models.commands.arguments import add_cache_flag, add_import_flag, epilog, parser
from models.commands.execution import check_extras, keep_compiled, run


def run_one(package: str, description: str, modules: Mapping[str, Any], arguments: list[str] | None) -> int:
    """Run the module that the first argument of ``python -m package`` names, and return the exit code.

    Args:
        modules: by the names of the subcommands; each has a docstring, ``add_flags`` and ``command``, and may have
            ``EXAMPLES`` for the end of its help.
        arguments: by default those of the command line.
    """
    flags = parser(package, package, description=description)
    add_cache_flag(flags)
    names = flags.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in modules.items():
        summary = str(module.__doc__).splitlines()[0]
        made = names.add_parser(
            name, help=summary, description=summary, epilog=epilog(getattr(module, "EXAMPLES", "")),
            formatter_class=flags.formatter_class,
        )  # fmt: skip
        module.add_flags(made)
        add_import_flag(made)
    chosen = flags.parse_args(arguments)
    keep_compiled(vars(chosen).pop("compilation_cache"))

    def command() -> None:
        check_extras(arguments)
        if "coordinator" in chosen:
            distributed.join(chosen)
        modules[chosen.name].command(chosen)

    return run(command, f"{package} {chosen.name}")
