"""`pyspec models`: what is known, what is here, and what a file says about itself."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pyspec.catalogue import Catalogue, Model, find_model_file, format_size, load_catalogue, resolve
from pyspec.cli.prompt_files import measurement_options, read_prompts
from pyspec.errors import UsageError
from pyspec.sampling import SamplingParams

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
    """List, fetch, inspect and squeeze model files.

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
    _print_table(header, rows, right=("size",))


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
@click.argument("draft", metavar="DRAFT", shell_complete=complete_model)
@click.option(
    "--for",
    "target",
    metavar="MODEL",
    shell_complete=complete_model,
    help="The target that it drafts for.  [default: the one that `models list` names]",
)
@click.option("--threads", type=int, metavar="N", help="Threads.  [default: physical cores]")
@click.option("--undo", is_flag=True, help="Draft with the file as it is again.")
@measurement_options
def squeeze(
    draft: str,
    target: str | None,
    threads: int | None,
    undo: bool,
    prompts: Sequence[Path],
    temperature: float,
    tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    """Find the cheapest copy of a draft.

    Makes copies with fewer bits to a weight, and measures what a step of each takes and how often the target
    accepts what it draws. The best is kept, and replaces DRAFT wherever it drafts for that target. Texts do
    not change, whatever the draft; only their speed does.
    """
    from pyspec import chat, squeeze
    from pyspec.cli.progress import step_bars
    from pyspec.llama import Model as LoadedModel
    from pyspec.tune import PROMPTS, Setup

    target_path, draft_path = _pair_of_draft(draft, target)
    if undo:
        squeeze.squeezed_path(target_path, draft_path).unlink(missing_ok=True)
        return
    texts = read_prompts(prompts) or PROMPTS
    with ExitStack() as stack:
        target_model = stack.enter_context(closing(LoadedModel(target_path)))
        setup = Setup(
            target=target_model,
            draft=stack.enter_context(closing(LoadedModel(draft_path))),
            prompts=[chat.message_ids(target_model, text) for text in texts],
            params=SamplingParams(temperature=temperature, seed=seed),
            tokens=tokens,
            threads=threads,
            progress=stack.enter_context(step_bars()),
        )
        variants = squeeze.squeeze(setup)
    kept = squeeze.preferred_draft(target_path, draft_path)
    if as_json:
        figures = [
            {
                **dataclasses.asdict(variant),
                "path": str(variant.path) if variant.path.exists() else None,
                "bytes_per_accepted": variant.bytes_per_accepted,
            }
            for variant in variants
        ]
        click.echo(json.dumps({"draft": str(draft_path), "kept": str(kept), "variants": figures}))
        return
    header = ("weights", "reads", "a step", "accepted", "per accepted token", "speed-up")
    _print_table(
        header,
        [
            (
                variant.name,
                format_size(variant.bytes_read),
                f"{variant.c:.2f}",
                f"{variant.acceptance:.3f}",
                format_size(round(variant.bytes_per_accepted)),
                f"{variant.speedup:.2f}",
            )
            for variant in variants
        ],
        right=header[1:],
    )
    click.echo(
        "A step is given as a share of a plain pass of the target; the speed-up is predicted."
    )
    click.echo(f"{draft_path.name} is best as it is" if kept == draft_path else f"kept: {kept}")


def _pair_of_draft(draft: str, target: str | None) -> tuple[Path, Path]:
    if target is None:
        catalogue = load_catalogue()
        named = [model for model in catalogue.models if model.name == draft.casefold()]
        targets = [model.name for each in named for model in catalogue.targets_of(each)]
        if len(targets) != 1:
            raise UsageError(f"which target does {draft} draft for? Name it with --for")
        (target,) = targets
    return resolve(target, download=False), resolve(draft, download=False)


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


def _print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str]
) -> None:
    """Print a table on a terminal, tab-separated lines elsewhere; some columns are set flush right."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            click.echo("\t".join(row))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in header:
        table.add_column(
            title,
            justify="right" if title in right else "left",
            no_wrap=title == header[0],
        )
    for row in rows:
        table.add_row(*row)
    Console().print(table)


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
