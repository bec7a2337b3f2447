"""`pyspec serve`: OpenAI's API and a chat page over HTTP."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from pyspec import bridge
from pyspec.catalogue import format_size, load_catalogue
from pyspec.cli.options import debug_option, model_options
from pyspec.cli.pair import ModelChoice
from pyspec.engine import Engine
from pyspec.errors import PyspecError, UsageError
from pyspec.sampling import Rule

if TYPE_CHECKING:
    from pyspec.server.settings import Settings

_WHOLE = click.IntRange(1)


@click.command(name="serve")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="N",
    help="Answers written at once, each with a context of its own.",
)
@click.option("--alias", metavar="NAME", help="What the model is called in requests.")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="PYSPEC_API_KEY",
    metavar="KEY",
    help="Ask for this key; repeatable. Other users of this machine see it here: $PYSPEC_API_KEY and "
    "--api-key-file hide it.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask for one of the keys in this file, one a line.",
)
@click.option(
    "--cors",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin use the service; repeatable.  [default: none]",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another name under which the service is reached, as through a proxy; repeatable.",
)
@click.option(
    "--max-body",
    type=_WHOLE,
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="Largest request.",
)
@click.option(
    "--max-prompt", type=_WHOLE, metavar="N", help="Most tokens of a prompt.  [default: --ctx]"
)
@click.option(
    "--max-tokens", type=_WHOLE, metavar="N", help="Most tokens of an answer.  [default: --ctx]"
)
@click.option(
    "--max-choices",
    type=_WHOLE,
    default=8,
    show_default=True,
    metavar="N",
    help="Most answers of one request.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    metavar="N",
    help="Most answers that wait for their turn; more are refused for the moment.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long answers may go on when the service is told to end.",
)
@click.option("--log-prompts", is_flag=True, help="Write requests with their text to the log.")
@debug_option
def command(
    models: ModelChoice,
    host: str,
    port: int,
    parallel: int,
    alias: str | None,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
    max_body: int,
    max_prompt: int | None,
    max_tokens: int | None,
    max_choices: int,
    max_waiting: int,
    grace: float,
    log_prompts: bool,
) -> None:
    """Serve OpenAI's API, and a chat page, over HTTP.

    Only this machine can reach it unless --host says otherwise. SIGTERM or Ctrl-C end it: answers that
    are being written may go on for --grace seconds, and a second signal ends them at once. What it says
    goes to standard error, a line for each request.
    """
    try:
        from pyspec.server.run import is_loopback, listen, run
        from pyspec.server.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyspec"):
            raise
        raise PyspecError(
            f'{error.name} is not installed, which the service needs: pip install "pyspec[serve]"'
        ) from error
    keys = [*api_keys, *_read_keys(api_key_file)]
    if any(not key.isascii() or not key.isprintable() or " " in key or not key for key in keys):
        raise UsageError("an API key is made of printable ASCII characters other than spaces")
    with listen(host, port) as listener:
        target_path, drafts = models.resolve()
        local = is_loopback(host)
        names = {"localhost", "127.0.0.1", "::1", host.lower(), *map(str.lower, hosts)}
        settings = Settings(
            model=alias or _known_name(models.model) or target_path.stem,
            rule=Rule(models.rule),
            api_keys=tuple(keys),
            # From elsewhere a service has names that it cannot know.
            hosts=frozenset(names) if local or hosts else None,
            origins=origins,
            max_body=max_body,
            max_prompt=max_prompt,
            max_tokens=max_tokens,
            max_choices=max_choices,
            max_waiting=max_waiting,
            grace=grace,
            log_prompts=log_prompts,
        )
        with Console(stderr=True).status(f"loading {target_path.name}"):
            engine = models.engine(target_path, drafts, parallel=parallel)
        logger = logging.getLogger("pyspec.server")
        logger.setLevel(min(logging.INFO, logging.getLogger().level))
        if not local and not keys:
            click.echo(
                f"warning: whoever reaches {host} can use the service: --api-key asks for a key",
                err=True,
            )

        if notice := bridge.notice():
            click.echo(f"pyspec: {notice}", err=True)

        def say_where() -> None:
            click.echo(_greeting(engine, settings, host, listener), err=True)

        with engine:
            run(engine, settings, listener, say_where)


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UsageError(f"cannot read {path}: {reason}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"{path} has no keys: write one a line")
    return keys


def _known_name(model: str | None) -> str | None:
    """The catalogue's name of the model, if it has one."""
    catalogue = load_catalogue()
    if model is None:
        return catalogue.default_target.name
    names = {entry.name for entry in catalogue.models}
    return model.casefold() if model.casefold() in names and not Path(model).is_file() else None


def _greeting(engine: Engine, settings: Settings, host: str, listener: socket.socket) -> str:
    """Where the service is, what it may need, and how to try it."""
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    models = [engine.target, *engine.drafts]
    cache = sum(model.kv_bytes(engine.n_ctx) for model in models)
    body = json.dumps({"model": settings.model, "messages": [{"role": "user", "content": "Hello"}]})
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    return "\n".join(
        (
            f"{settings.model} at {url}/v1, a chat page at {url}/, the API at {url}/docs",
            f"memory: {format_size(sum(model.size for model in models))} of weights, and for "
            f"{engine.parallel} answers at once {format_size(engine.parallel * cache)} of caches "
            f"({engine.n_ctx} tokens each)",
            f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        )
    )
