"""Stage model: a pinned snapshot of the base model, every file proved."""

import asyncio
from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.context import Run
from tasks.plan import check_model
from tasks.retries import TRANSIENT
from tasks.stage import StageResult, run_stage
from trainium.errors import UserError
from trainium.model.snapshot import ModelFolder, check_snapshot
from trainium.run.records import Output, StageRecord
from trainium.text import size


@task(name="model", task_run_name="model", cache_policy=NO_CACHE, **TRANSIENT)
async def fetch_model(run: Run) -> StageRecord:
    """Bring the base model to the run, or look at it where it is."""
    model = run.recipe.model
    inputs = {
        "source": model.source,
        "revision": model.revision,
        "folder": model.folder,
        "chat_template": run.recipe.export.chat_template,
    }
    return await run_stage(run, "model", inputs, lambda: asyncio.to_thread(_fetch, run))


def _fetch(run: Run) -> StageResult:
    if run.recipe.model.kind == "hub":
        verified, facts = _download(run)
    elif run.recipe.model.kind == "rehearsal":
        from trainium.rehearsal.model import write_model  # torch: only where it is needed

        write_model(run.places.base)
        verified, facts = ("small random Llama written",), {}
    else:
        verified, facts = ("used where it is",), {}
    model = check_snapshot(run.places.base)
    check_model(run, dict(model.config))
    _check_chat_template(run)
    return StageResult(
        outputs=(Output.of(run.places.base),),
        verified=(
            *verified,
            f"{len(model.tensors)} tensors, every header readable, {size(model.total_bytes)}",
        ),
        notes=_notes(model),
        facts={**facts, "digest": model.digest},
        table=[{"file": name, "bytes": count} for name, count in model.weights.items()],
    )


def _download(run: Run) -> tuple[tuple[str, ...], dict[str, Any]]:
    from trainium.model.hub import download, resolve

    repo, revision = run.recipe.model.source, run.recipe.model.revision
    endpoint = run.hub.endpoint if run.hub else None  # the hub that HF_ENDPOINT names, or the public one
    token = run.hub.read_token() if run.hub else None
    commit = resolve(repo, revision, token=token, endpoint=endpoint)
    report = download(repo, commit, run.places.base, token=token, endpoint=endpoint, progress=_progress(run))
    text = f"{len(report.files)} files of {repo} at {commit[:12]} equal to the hub's digests"
    text += f", {size(report.downloaded_bytes)} of them downloaded now"
    return (text,), {"repository": repo, "commit": commit, "files": {f.path: f.digest for f in report.files}}


def _progress(run: Run) -> Callable[[Any], None]:
    def tell(progress: Any) -> None:
        fraction = progress.bytes_done / progress.bytes_total if progress.bytes_total else None
        run.progress("model", f"{size(progress.bytes_done)} of {size(progress.bytes_total)}", fraction)

    return tell


def _check_chat_template(run: Run) -> None:
    """A template that does not render is refused here, not by the export after days of training."""
    template = run.recipe.export.chat_template
    if template is None:
        return
    from trainium.model.loading import check_chat_template, load_tokenizer  # transformers: seconds of import

    try:
        check_chat_template(load_tokenizer(run.places.base), template)
    except UserError as error:
        raise UserError(f"export.chat_template: {error}") from error


def _notes(model: ModelFolder) -> tuple[str, ...]:
    tied = "lm_head.weight" not in model.tensors
    return ("tied embeddings: lm_head is written out of embed_tokens for training, and stays untied",) if tied else ()
