from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from trainium.config.deviations import ABSENT, DEVIATIONS, When
from trainium.config.nxdt import (
    NxdtPaths,
    Phase,
    ResumePoint,
    UnknownShapeError,
    nxdt_config,
    to_yaml,
    trainer_model_config,
)
from trainium.config.recipe import load_recipe
from trainium.config.schema import Recipe
from trainium.rehearsal.compose import register_resolvers

RUN = Path("/runs/one")


def paths(run: Path) -> NxdtPaths:
    return NxdtPaths(
        base=run / "base",
        model_config=run / "config" / "config.json",
        train=run / "data" / "train.jsonl",
        validation=run / "data" / "validation.jsonl",
        nxd=run / "nxd",
        experiment=run / "experiment",
        cache=run / "cache",
    )


CHECKPOINT = RUN / "experiment" / "checkpoints" / "hf_tanuki_8B_SFT--step=50-consumed_samples=400.0.ckpt"
TUTORIAL = Path(__file__).with_name("tutorial_config.yaml")
ENVIRONMENT = {  # the tutorial's exports, as far as its config reads them
    "CHECKPOINT_DIR": "/fsx/checkpoints/tanuki-8b/pretrained_model/",
    "TP_DEGREE": "32",
    "KV_REPLICATOR": "4",
    "DATA_DIR": "/fsx/examples_datasets/llama3_8b",
    "ORIGINAL_MODEL_PATH": "/fsx/models/Tanuki-8B-dpo-v1.0",
    "MODEL_CONFIG_PATH": "/fsx/models/Tanuki-8B-dpo-v1.0/config.json",
}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def resolved(config: Any) -> dict[str, Any]:
    register_resolvers()
    return flat(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def generated(
    recipe: Recipe, model: dict[str, Any] | None = None, phase: Phase = "train", resume: ResumePoint | None = None
) -> DictConfig:
    return nxdt_config(recipe, model, paths(RUN), phase, resume)


@pytest.mark.parametrize("when", ["always", "compile", "resume"])
def test_parity_with_the_tutorial(when: When, tanuki: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of the tutorial's file is in ours with its value, but for the named deviations, and no more keys."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    tutorial = resolved(OmegaConf.load(TUTORIAL))
    ours = resolved(
        generated(
            tanuki,
            phase="compile" if when == "compile" else "train",
            resume=ResumePoint(CHECKPOINT) if when == "resume" else None,
        )
    )
    allowed = {d.key: d for d in DEVIATIONS if d.when == "always"} | {d.key: d for d in DEVIATIONS if d.when == when}
    differing = {key for key in tutorial | ours if tutorial.get(key, ABSENT) != ours.get(key, ABSENT)}
    assert differing == set(allowed)
    for key, deviation in allowed.items():
        expected = deviation.ours
        if isinstance(expected, str):
            expected = expected.replace("<run>", str(RUN)).replace("<checkpoint>", CHECKPOINT.name)
        assert ours.get(key, ABSENT) == expected, key
        assert deviation.reason


def test_the_deviations_quote_the_tutorial() -> None:
    raw = flat(OmegaConf.to_container(OmegaConf.load(TUTORIAL), resolve=False))
    assert {d.key: d.tutorial for d in DEVIATIONS} == {d.key: raw[d.key] for d in DEVIATIONS}


def test_the_written_file_keeps_interpolations_and_reads_back(tanuki: Recipe) -> None:
    config = generated(tanuki)
    text = to_yaml(config)
    assert "${multiply:${distributed_strategy.tensor_model_parallel_size}," in text
    assert "max_steps: ${trainer.max_steps}" in text
    assert resolved(OmegaConf.create(text)) == resolved(config)
    assert resolved(config)["exp_manager.checkpoint_callback_params.model_parallel_size"] == 32


def test_the_name_is_spelled_as_nxdt_reads_it(tanuki: Recipe) -> None:
    assert "aync_exec_max_inflight_requests: 5" in to_yaml(generated(tanuki))


def test_a_fresh_start_reads_the_converted_weights_alone(tanuki: Recipe) -> None:
    config = generated(tanuki)
    assert config.exp_manager.resume_from_checkpoint == str(RUN / "nxd")
    assert config.model.weight_init_only is True


def test_a_resume_reads_everything_of_its_checkpoint(tanuki: Recipe) -> None:
    config = generated(tanuki, resume=ResumePoint(CHECKPOINT))
    assert config.exp_manager.resume_from_checkpoint == str(CHECKPOINT)
    assert config.model.weight_init_only is False


def test_compilation_never_resumes(tanuki: Recipe) -> None:
    config = generated(tanuki, phase="compile", resume=ResumePoint(CHECKPOINT))
    assert config == generated(tanuki, phase="compile")
    assert config.exp_manager.resume_from_checkpoint == str(RUN / "nxd")


def test_both_phases_describe_the_same_graphs(tanuki: Recipe) -> None:
    compiled, trained = resolved(generated(tanuki, phase="compile")), resolved(generated(tanuki))
    assert {key for key in trained if compiled[key] != trained[key]} == {"exp_manager.explicit_log_dir"}


@pytest.mark.parametrize(
    ("heads", "qkv", "flags"),
    [
        ((32, 8), "auto", (True, True)),
        ((32, 32), "auto", (False, True)),
        ((32, 8), "split", (True, False)),
        ((32, 32), "plain", (False, False)),
    ],
)
def test_the_trainer_builds_what_the_converter_wrote(
    heads: tuple[int, int], qkv: str, flags: tuple[bool, bool], tanuki_config: dict[str, Any]
) -> None:
    model = tanuki_config | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = generated(load_recipe("tanuki-8b-sft", [f"convert.qkv={qkv}"]), model)
    assert (config.model.qkv_linear, config.model.fuse_qkv) == flags


def test_without_any_shape_it_says_what_is_missing(tanuki_config: dict[str, Any]) -> None:
    recipe = load_recipe("tanuki-8b-sft", ["model.expected=null"])
    with pytest.raises(UnknownShapeError, match=r"model\.expected"):
        generated(recipe)
    assert generated(recipe, tanuki_config).model.fuse_qkv is True


def test_nothing_overwrites_config_json(tanuki: Recipe, tanuki_config: dict[str, Any]) -> None:
    model = generated(tanuki, tanuki_config).model
    assert not {"rope_theta", "num_layers", "hidden_size", "max_position_embeddings"} & set(model)


def test_the_trainer_reads_the_base_config_as_it_is(tanuki_config: dict[str, Any]) -> None:
    assert trainer_model_config(tanuki_config) == tanuki_config


def test_the_trainer_reads_untied_embeddings(tanuki_config: dict[str, Any]) -> None:
    tied = tanuki_config | {"tie_word_embeddings": True}
    assert trainer_model_config(tied) == tied | {"tie_word_embeddings": False}
    assert tied["tie_word_embeddings"] is True


def test_the_trainer_reads_the_rope_settings_of_transformers_5(tanuki_config: dict[str, Any]) -> None:
    del tanuki_config["rope_theta"]
    plain = tanuki_config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert trainer_model_config(plain) == plain | {"rope_theta": 5e5}
    scaled = tanuki_config | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}
    changed = trainer_model_config(scaled)
    assert changed == scaled | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}


def test_devices_follow_the_instance(tmp_path: Path) -> None:
    shape = ["model.expected={layers: 4, hidden_size: 64, heads: 8, kv_heads: 4}"]
    rehearsal = load_recipe("rehearsal", [*shape, "parallelism.pipeline=2", "resources.nodes=2"])
    trainer = generated(rehearsal).trainer
    assert (trainer.devices, trainer.num_nodes) == (8, 2)
    assert generated(load_recipe("rehearsal", [*shape, "instance_type=trn2.48xlarge"])).trainer.devices == 64


def test_hostile_paths_arrive_as_they_are(tanuki: Recipe) -> None:
    run = Path("/runs/a ${oc.env:HOME} 'b\" $(x); é: #c")
    config = nxdt_config(tanuki, None, paths(run), "train")
    assert resolved(OmegaConf.create(to_yaml(config)))["exp_manager.explicit_log_dir"] == str(run / "experiment")
