"""`pyspec models`: what is known, what is here, and what a file says about itself."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from pyspec.catalogue import Catalogue, Model, find_model_file, format_size, load_catalogue, resolve

TEMPLATE_LINES = 3  # of the chat template, shown by inspect


def complete_model(
    ctx: click.Context,  # noqa: ARG001
    param: click.Parameter,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem]:
    """Complete a name of the catalogue, else a path."""
    names = [
        CompletionItem(model.name, help=model.title)
        for model in load_catalogue().models
        if model.name.startswith(incomplete.casefold())
    ]
    return names or [CompletionItem(incomplete, type="file")]


@click.group()
def command() -> None:
    """List, fetch and inspect model files.

    Files are kept in the user's cache folder, or in $PYSPEC_HOME/models if that is set. Setting
    PYSPEC_OFFLINE=1 forbids downloads; HF_HUB_OFFLINE=1 only those from Hugging Face.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """Show the models that have a name here.

    A table on a terminal, tab-separated lines otherwise.
    """
    catalogue = load_catalogue()
    if as_json:
        click.echo(
            json.dumps([_description(model, catalogue) for model in catalogue.models], indent=2)
        )
        return
    header = ("name", "size", "quantised", "licence", "downloaded", "draft for")
    rows = [
        (
            model.name,
            format_size(model.bytes),
            model.quantisation,
            model.licence,
            "yes" if model.is_downloaded() else "no",
            ", ".join(target.name for target in catalogue.targets_of(model)),
        )
        for model in catalogue.models
    ]
    if not sys.stdout.isatty():
        for row in (header, *rows):
            click.echo("\t".join(row))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in header:
        table.add_column(
            title, justify="right" if title == "size" else "left", no_wrap=title == "name"
        )
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_model)
def pull(names: tuple[str, ...]) -> None:
    """Fetch models and check their hashes.

    NAME is one that `pyspec models list` shows, or org/repo:file.gguf on Hugging Face. A file that
    is here already is checked, and fetched again if it is damaged. Prints where each file lies.
    """
    from pyspec.cli.progress import transfer_progress
    from pyspec.download import fetch, verify

    for model in [find_model_file(name) for name in names]:
        with transfer_progress() as progress:
            if not verify(model, progress):
                fetch(model, progress)
        click.echo(model.path)


@command.command()
@click.argument("name", shell_complete=complete_model)
def path(name: str) -> None:
    """Print where a downloaded model lies."""
    click.echo(resolve(name, download=False))


@command.command()
@click.argument("model", metavar="FILE_OR_NAME", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the whole chat template.")
def inspect(model: str, as_json: bool) -> None:
    """Show what a GGUF file says about itself."""
    from pyspec.gguf_file import inspect_gguf

    info = inspect_gguf(resolve(model, download=False))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(info), default=str, indent=2))
        return
    types = ", ".join(f"{count} {name}" for name, count in info.tensor_types.items())
    lines = {
        "file": info.path,
        "name": info.name,
        "architecture": info.architecture,
        "parameters": f"{info.parameters:,}",
        "size": f"{format_size(info.bytes)} ({info.bytes:,} bytes)",
        "quantisation": info.file_type,
        "tensors": types,
        "context length": info.context_length,
        "vocabulary": info.vocabulary_size,
        "tokenizer": " ".join(filter(None, (info.tokenizer, info.pre_tokenizer))) or None,
        "bos": _token(info.bos_id, info.bos_text),
        "eos": _token(info.eos_id, info.eos_text),
        "chat template": _beginning(info.chat_template),
    }
    for label, value in lines.items():
        shown = "not given" if value is None else _printable(str(value))
        click.echo(f"{label + ':':<16}{shown}")


def _description(model: Model, catalogue: Catalogue) -> dict[str, Any]:
    return {
        **dataclasses.asdict(model),
        "path": str(model.path),
        "downloaded": model.is_downloaded(),
        "draft_for": [target.name for target in catalogue.targets_of(model)],
        "default_target": model == catalogue.default_target,
    }


def _printable(text: str) -> str:
    """Replace what could steer the terminal: the text comes from a file that anybody may write."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _token(number: int | None, text: str | None) -> str | None:
    return None if number is None else f"{number} {text or ''}".rstrip()


def _beginning(template: str | None) -> str | None:
    if template is None:
        return None
    lines = template.splitlines()
    more = ["..."] if len(lines) > TEMPLATE_LINES else []
    return "\n".join(f"{'':<16}{line[:80]}" for line in [*lines[:TEMPLATE_LINES], *more]).lstrip()
