"""`tensorbroker serve | status | check | explain`, and `python -m broker`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from broker.flags import UsageError
from broker.logs import drop_stdout
from broker.options import Parser, parse_serve
from broker.trace_flags import check_file

USAGE = """usage: tensorbroker COMMAND …

  serve --model-repository DIR [flags of tritonserver] [--directory RUN_DIR]   serve the models of a repository
  status [--json] [--directory RUN_DIR]                                        what the running broker is doing
  check DIR… [--strict]                                                        configure all models, serve none
  explain MODEL [--model-repository DIR | --directory RUN_DIR]                 a model's final configuration

`tensorbroker COMMAND --help` tells more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["--version"], ["version"]):
        print(f"tensorbroker {version('tensorbroker')}")
        return 0
    command = _COMMANDS.get(given[0]) if given else None
    if command is None:
        asked_for_help = given[:1] in (["--help"], ["-h"])
        if given and not asked_for_help:
            print(f"Unexpected argument: {given[0]}", file=sys.stderr)
        print(USAGE, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 1
    try:
        status = command(given[1:])
        print(end="", flush=True)
        return status
    except UsageError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:  # `tensorbroker status | head`: who read has seen enough
        drop_stdout()
    return 1


def _serve(arguments: list[str]) -> int:
    options = parse_serve(arguments)
    check_file(options.trace)
    from broker.server import serve  # the other commands do without the broker's parts

    return serve(options)


def _status(arguments: list[str]) -> int:
    from broker.commands import status
    from shm.run_directory import default_directory

    parser = Parser(prog="tensorbroker status", allow_abbrev=False, description="What the running broker is doing.")
    parser.add_argument("--directory", metavar="RUN_DIR", help="default: $TENSORBROKER_DIR or per user")
    parser.add_argument("--json", action="store_true", help="the whole document")
    given = parser.parse_args(arguments)
    return status(given.directory or default_directory(), as_json=given.json)


def _check(arguments: list[str]) -> int:
    from broker.commands import check_repositories

    parser = Parser(prog="tensorbroker check", allow_abbrev=False, description="Configure all models, serve none.")
    parser.add_argument("repository", metavar="DIR", nargs="+")
    parser.add_argument("--strict", action="store_true", help="take nothing from the model files")
    parser.add_argument("--model-config-name", metavar="NAME", default="", help="take configs/NAME.pbtxt where it is")
    given = parser.parse_args(arguments)
    return check_repositories(given.repository, strict=given.strict, config_name=given.model_config_name)


def _explain(arguments: list[str]) -> int:
    from broker.explanation import explain, explain_served
    from shm.run_directory import default_directory

    parser = Parser(
        prog="tensorbroker explain",
        allow_abbrev=False,
        description="A model's final configuration, and the origin of each value: as the running broker serves it, "
        "what came with the load included; with --model-repository as it would be served from there.",
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--directory", metavar="RUN_DIR", help="of the broker; default: $TENSORBROKER_DIR or per user")
    parser.add_argument("--model-repository", metavar="DIR", action="append", default=[], help="asks no broker")
    parser.add_argument("--config", metavar="FILE", help="in place of config.pbtxt, in JSON, as load(config=…) has it")
    parser.add_argument("--model-config-name", metavar="NAME", default="", help="take configs/NAME.pbtxt where it is")
    parser.add_argument("--json", action="store_true", help="as a document, with the origins by field")
    given = parser.parse_args(arguments)
    if not given.model_repository:
        if given.config is not None or given.model_config_name:
            raise UsageError("--model-repository must be specified with --config and --model-config-name")
        return explain_served(given.directory or default_directory(), given.model, as_json=given.json)
    if given.directory:
        raise UsageError("--directory names a running broker, which --model-repository does not ask: give one of them")
    return explain(
        given.model_repository,
        given.model,
        as_json=given.json,
        config_name=given.model_config_name,
        override=None if given.config is None else _text_of(given.config),
    )


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: is no text: {error}") from None


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "status": _status,
    "check": _check,
    "explain": _explain,
}

if __name__ == "__main__":
    sys.exit(main())
