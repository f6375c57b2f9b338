import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainium.config.instances import INSTANCES
from trainium.config.plan import Plan, PlanError, plan
from trainium.config.recipe import load_recipe
from trainium.config.rules import RULES, read_model_config

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def tanuki_plan(config: dict[str, Any] | None, *overrides: str) -> Plan:
    return plan(load_recipe("tanuki-8b-sft", overrides), config)


def errors(found: Plan) -> dict[str, str]:
    return {f"{finding.id} {finding.key}": str(finding) for finding in found.errors}


def test_the_tutorials_run_passes_and_is_predicted(tanuki_config: dict[str, Any]) -> None:
    found = tanuki_plan(tanuki_config)
    assert found.verified
    assert not found.errors
    assert not found.warnings
    predicted = found.predicted
    assert (predicted.cores, predicted.data_parallel, predicted.gradient_accumulation) == (32, 1, 8)
    assert (predicted.shards, predicted.steps, predicted.checkpoints, predicted.kept_checkpoints) == (32, 100, 2, 2)
    assert predicted.tokens == 100 * 8 * 4096
    assert predicted.model_bytes is not None
    assert predicted.optimizer_bytes is not None
    # The sizes that reference measurements and the tutorial give for this model: 15.5 GiB, about 91 GB by `du`.
    assert predicted.model_bytes / 2**30 == pytest.approx(15.5, abs=0.05)
    assert predicted.optimizer_bytes / 2**30 == pytest.approx(93, abs=0.5)


def test_without_config_json_the_expected_shape_is_judged_and_marked() -> None:
    found = tanuki_plan(None)
    assert not found.verified
    assert not found.errors
    assert "unverified" in {finding.id for finding in found.of("note")}
    assert found.predicted.model_bytes is None
    assert "layout parallelism.kv_replicator" in errors(tanuki_plan(None, "parallelism.kv_replicator=2"))


@pytest.mark.parametrize(
    ("overrides", "id", "key", "fix"),
    [
        (["parallelism.tensor=12"], "tensor-in-node", "parallelism.tensor", "1, 2, 4, 8, 16, 32"),
        (["parallelism.pipeline=3"], "world-size", "parallelism.pipeline", "resources.nodes=3"),
        (["parallelism.tensor=64", "resources.nodes=2"], "tensor-in-node", "parallelism.tensor", "32"),
        (["parallelism.kv_replicator=2"], "layout", "parallelism.kv_replicator", "parallelism.kv_replicator=4"),
        (["convert.qkv=coalesced"], "layout", "convert.qkv", ""),
        (["parallelism.pipeline=64", "resources.nodes=64"], "layout", "parallelism.pipeline", ""),
        (["parallelism.virtual_pipeline=2"], "virtual-pipeline", "parallelism.virtual_pipeline", "=1"),
        (["training.seq_length=2049"], "sequence-parallel", "training.seq_length", "2048 or 2080"),
        (["training.seq_length=3072"], "flash-attention", "training.seq_length", "2048 or 4096"),
        (["training.seq_length=8192"], "positions", "training.seq_length", "4096 or less"),
        (["resources.nodes=3"], "batch", "training.global_batch_size", "6 or 9"),
        (["training.micro_batch_size=3"], "batch", "training.global_batch_size", "6 or 9"),
        (["training.checkpoint_every=30"], "checkpoint-cadence", "training.checkpoint_every", "=25"),
        (["training.checkpoint_every=200"], "checkpoint-cadence", "training.checkpoint_every", "=100"),
        (["training.warmup_steps=100"], "warmup", "training.warmup_steps", "Use 10"),
        (["training.compiler_flags='--cache_dir=/x'"], "cache-dir", "training.compiler_flags", "compile.cache"),
        (["training.experiment=my-mixtral"], "experiment-name", "training.experiment", "another"),
        (["model.expected.layers=24"], "expected-shape", "model.expected.layers", "=32"),
        (["model.source=/nowhere/x"], "model-folder", "model.source", "config.json"),
        (["dataset.source=/nowhere/x"], "dataset-folder", "dataset.train_file", "dataset.source"),
        (["resources.train.cpus_per_task=500"], "cpus", "resources.train.cpus_per_task", "Use 128"),
    ],
)
def test_what_cannot_work_is_refused(
    tanuki_config: dict[str, Any], overrides: list[str], id: str, key: str, fix: str
) -> None:
    found = tanuki_plan(tanuki_config, *overrides)
    assert f"{id} {key}" in errors(found)
    assert fix in errors(found)[f"{id} {key}"]
    with pytest.raises(PlanError, match=re.escape(key)):
        found.check()


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallelism.tensor=8", "parallelism.kv_replicator=1"],
        ["parallelism.tensor=16", "parallelism.kv_replicator=2"],
        ["parallelism.tensor=8", "parallelism.kv_replicator=1", "parallelism.pipeline=4"],
        ["resources.nodes=8"],
        ["training.seq_length=2048"],
        ["training.seq_length=992", "training.flash_attention=false"],
        ["training.max_steps=150"],
        ["instance_type=trn1n.32xlarge"],
    ],
)
def test_what_can_work_passes(tanuki_config: dict[str, Any], overrides: list[str]) -> None:
    tanuki_plan(tanuki_config, *overrides).check()


@pytest.mark.parametrize(
    ("change", "id"),
    [
        ({"model_type": "qwen2"}, "model-family"),
        ({"model_type": "qwen3"}, "model-family"),
        ({"model_type": "gemma2"}, "model-family"),
        ({"model_type": "mixtral"}, "model-family"),
        ({"model_type": "gpt2"}, "model-family"),
        ({"attention_bias": True}, "model-family"),
        ({"head_dim": 64}, "head-dim"),
        ({"model_type": "mistral", "sliding_window": 1024}, "sliding-window"),
        ({"num_hidden_layers": 30}, "expected-shape"),
        ({"vocab_size": 65025}, "layout"),
        ({"num_hidden_layers": None}, "model-family"),
    ],
)
def test_models_that_the_trainer_would_silently_change_are_refused(
    tanuki_config: dict[str, Any], change: dict[str, Any], id: str
) -> None:
    assert id in {finding.id for finding in tanuki_plan(tanuki_config | change).errors}


@pytest.mark.parametrize(
    ("overrides", "id"),
    [
        (["resources.requeue=true"], "requeue"),
        (["resources.requeue=null"], "requeue"),
        (["resources.compile.cpus_per_task=1"], "cpus"),
        (["training.weight_decay=0.1"], "weight-decay"),
        (["parallelism.zero1=false"], "precision-zero1"),
        (["training.async_checkpointing=true"], "async-checkpointing"),
        (
            [
                "parallelism.tensor=8",
                "parallelism.kv_replicator=1",
                "parallelism.pipeline=4",
                "training.global_batch_size=2",
            ],
            "pipeline-bubble",
        ),
    ],
)
def test_what_is_unwise_is_a_warning(tanuki_config: dict[str, Any], overrides: list[str], id: str) -> None:
    found = tanuki_plan(tanuki_config, *overrides)
    assert not found.errors
    assert [finding.id for finding in found.warnings] == [id]


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["parallelism.tensor=16", "parallelism.kv_replicator=2"], {}),  # two query heads and one kv head per core
        (
            ["instance_type=trn2.48xlarge", "training.global_batch_size=64"],
            {},
        ),
    ],
)
def test_the_upstream_converter_is_refused_where_it_is_silently_wrong(
    tanuki_config: dict[str, Any], overrides: list[str], change: dict[str, Any]
) -> None:
    config = tanuki_config | change
    assert "upstream-converter convert.engine" in errors(tanuki_plan(config, *overrides, "convert.engine=nxdt"))
    assert "upstream-converter convert.engine" not in errors(tanuki_plan(config, *overrides))
    assert not tanuki_plan(tanuki_config, "convert.engine=nxdt").errors


def test_what_the_upstream_converter_cannot_merge_is_refused_before_training(
    tanuki_config: dict[str, Any],
) -> None:
    multi_head = tanuki_config | {"num_key_value_heads": 32}
    asked = ("parallelism.kv_replicator=1", "convert.qkv=plain", "convert.engine=nxdt")
    assert list(errors(tanuki_plan(multi_head, *asked, "model.expected=null"))) == ["upstream-converter convert.engine"]


def test_the_rehearsal_instance_has_no_device_rules(folders: list[str]) -> None:
    found = plan(load_recipe("smollm2", folders), SMOLLM2)
    found.check()
    assert "tied-embeddings" in {finding.id for finding in found.of("note")}
    assert found.predicted.shards == 6


def test_the_same_on_a_real_instance_is_refused_saying_why(folders: list[str]) -> None:
    found = plan(load_recipe("smollm2", [*folders, "instance_type=trn1.32xlarge"]), SMOLLM2)
    assert "32 cores of a trn1.32xlarge" in errors(found)["tensor-in-node parallelism.tensor"]
    assert "flash-attention training.seq_length" in errors(found)


def test_all_errors_come_in_one_message(tanuki_config: dict[str, Any]) -> None:
    found = tanuki_plan(
        tanuki_config, "parallelism.tensor=12", "training.checkpoint_every=30", "training.seq_length=8000"
    )
    with pytest.raises(PlanError) as caught:
        found.check()
    message = str(caught.value)
    for key in ("parallelism.tensor=12", "training.checkpoint_every=30", "training.seq_length=8000"):
        assert key in message
    assert message.count("\n  - ") == len(caught.value.findings) == len(found.errors)


def test_two_rehearsal_nodes_are_two_replicas() -> None:
    found = plan(load_recipe("rehearsal", ["resources.nodes=2"]))
    assert (found.predicted.data_parallel, found.predicted.gradient_accumulation) == (2, 4)


def test_the_plan_is_json(tanuki_config: dict[str, Any]) -> None:
    data = json.loads(json.dumps(tanuki_plan(tanuki_config).to_json()))
    assert data["predicted"]["shards"] == 32
    assert {"id", "severity", "key", "value", "message", "fix", "source"} == set(data["findings"][0])


def test_config_json_of_a_model_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    recipe = load_recipe("smollm2", [f"model.source={tmp_path}", "dataset.source=/d"])
    assert read_model_config(recipe) == SMOLLM2
    assert read_model_config(load_recipe("rehearsal")) is None


def test_no_rule_stumbles_without_config_json() -> None:
    recipe = load_recipe("tanuki-8b-sft", ["model.expected=null"])
    assert not plan(recipe).errors
    assert len(set(RULES)) == len(RULES)


def test_instances() -> None:
    assert {name: (kind.cores, kind.memory_per_core) for name, kind in INSTANCES.items()} == {
        "trn1.2xlarge": (2, 16),
        "trn1.32xlarge": (32, 16),
        "trn1n.32xlarge": (32, 16),
        "trn2.48xlarge": (64, 24),
        "rehearsal": (None, None),
    }


def test_a_conversion_is_shared_by_no_more_jobs_than_ranks_and_only_by_our_converter(
    tanuki_config: dict[str, Any],
) -> None:
    assert not tanuki_plan(tanuki_config, "convert.array=32").errors
    assert "convert-array convert.array" in errors(tanuki_plan(tanuki_config, "convert.array=33"))
    assert "convert-array convert.array" in errors(tanuki_plan(tanuki_config, "convert.array=2", "convert.engine=nxdt"))


def test_a_notice_before_the_time_limit_leaves_time_to_train() -> None:
    late, early = ["resources.train.time=01:00:00", "resources.train.signal_before_end=600"], "3600"
    assert not tanuki_plan(None, *late).errors
    found = errors(tanuki_plan(None, late[0], f"resources.train.signal_before_end={early}"))
    assert "asked to end at once" in found["notice resources.train.signal_before_end"]
