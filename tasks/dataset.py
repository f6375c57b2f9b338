"""Stage dataset: the rows, checked one by one, in the columns the trainer reads."""

import asyncio
from dataclasses import asdict
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.context import Run
from tasks.retries import TRANSIENT
from tasks.stage import StageResult, run_stage
from trainium.dataset.fetch import S3Access, fetch
from trainium.dataset.prepare import DatasetReport, SplitReport, prepare
from trainium.run.records import Output, StageRecord
from trainium.text import size


@task(name="dataset", task_run_name="dataset", cache_policy=NO_CACHE, **TRANSIENT)
async def prepare_dataset(run: Run) -> StageRecord:
    """Fetch the rows, map their columns, and say what training will make of them."""
    training = run.recipe.training
    inputs = {
        "dataset": run.recipe.dataset.model_dump(mode="json"),
        "seq_length": training.seq_length,
        "global_batch_size": training.global_batch_size,
        "packing": training.packing,
    }
    return await run_stage(run, "dataset", inputs, lambda: asyncio.to_thread(_prepare, run))


def _prepare(run: Run) -> StageResult:
    dataset, training = run.recipe.dataset, run.recipe.training
    train, validation, origin = _sources(run)
    report = prepare(
        [train],
        [validation],
        run.places.data,
        prompt_field=dataset.prompt_field,
        response_field=dataset.response_field,
        seq_length=training.seq_length,
        tokenizer_folder=run.places.base,
        global_batch_size=training.global_batch_size,
        packing=training.packing,
        progress=lambda rows: run.progress("dataset", f"{rows} rows read"),
    )
    splits = {"train": report.train} | ({"validation": report.validation} if report.validation else {})
    return StageResult(
        outputs=(Output.of(run.places.data),),
        verified=(f"{sum(split.rows for split in splits.values())} rows, each one usable", *origin),
        notes=report.notes,
        facts={
            "digest": report.digest,
            "rows": report.train.rows,
            "steps_per_epoch": report.steps_per_epoch,
            "lengths": {name: asdict(split.lengths) for name, split in splits.items()},
        },
        table=[_row(name, split, report) for name, split in splits.items()],
    )


def _sources(run: Run) -> tuple[Path, Path, tuple[str, ...]]:
    """Both files as they came, and what their content was compared with."""
    dataset = run.recipe.dataset
    names = [dataset.train_file, dataset.validation_file]
    if dataset.kind == "rehearsal":
        from trainium.rehearsal.model import write_dataset

        write_dataset(run.places.source_data)
        return run.places.source_data / names[0], run.places.source_data / names[1], ()
    files = fetch(
        dataset.source,
        names,
        run.places.source_data,
        access=_access(run),
        progress=lambda done, total: run.progress(
            "dataset", f"{size(done)} of {size(total)}", done / total if total else None
        ),
    )
    origin = tuple(
        f"{Path(file.source).name} compared by {file.verified}" for file in files if file.verified != "local"
    )
    return files[0].path, files[1].path, origin


def _access(run: Run) -> S3Access:
    storage, unsigned = run.storage, run.recipe.dataset.unsigned
    if storage is None:
        return S3Access(unsigned=unsigned)
    secrets = (storage.access_key_id, storage.secret_access_key, storage.session_token)
    key_id, key, session = (secret.get_secret_value() if secret else None for secret in secrets)
    return S3Access(
        unsigned=unsigned,
        region=storage.region,
        endpoint_url=storage.endpoint_url,
        access_key_id=key_id,
        secret_access_key=key,
        session_token=session,
    )


def _row(name: str, split: SplitReport, report: DatasetReport) -> dict[str, object]:
    return {
        "split": name,
        "rows": split.rows,
        "mean tokens": round(split.lengths.mean, 1),
        "95 % up to": split.lengths.p95,
        "longest": split.lengths.max,
        "samples per epoch": split.samples,
        "dropped": split.dropped,
        "packing": report.packing,
    }
