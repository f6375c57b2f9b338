"""Composing the config and what the trainer refuses before it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from trainium.rehearsal.compose import ConfigCompositionError, compose
from trainium.rehearsal.devices import INSTANCES, check_cores
from trainium.rehearsal.environment import apply_environment
from trainium.rehearsal.faults import Faults, parse_faults
from trainium.rehearsal.lines import format_number
from trainium.rehearsal.settings import read_settings

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Workspace

REHEARSAL = INSTANCES["rehearsal"]


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    (tmp_path / "train.yaml").write_text(
        "trainer: {devices: 4, lr: 1e-3}\nproduct: ${multiply:${trainer.devices}, 2}\n"
    )
    return tmp_path


def composed(folder: Path, *overrides: str) -> Any:
    words = [f"--config-path={folder}", "--config-name=train", *overrides]
    return OmegaConf.to_container(compose(words, Path("/nowhere")), resolve=True)


def test_overrides(config_folder: Path) -> None:
    found = composed(config_folder, "trainer.devices=8", "+extra.new=[1,2]", "trainer.lr='a = b'")
    assert found == {"trainer": {"devices": 8, "lr": "a = b"}, "product": 16, "extra": {"new": [1, 2]}}
    assert composed(config_folder, "trainer.devices=null", "product=${trainer.lr}")["trainer"]["devices"] is None


@pytest.mark.parametrize(
    "override", ["trainer.device=8", "trainer.lr=/step=5", "trainer.lr=$(id)", "trainer.lr=it's", "trainer.lr", "=3"]
)
def test_overrides_that_hydra_refuses(config_folder: Path, override: str) -> None:
    with pytest.raises(ConfigCompositionError, match=re.escape(override.split("=")[0] or "=3")):
        composed(config_folder, override)


def test_a_missing_config(config_folder: Path) -> None:
    with pytest.raises(ConfigCompositionError, match="Cannot find primary config 'other'"):
        compose([f"--config-path={config_folder}", "--config-name=other"], Path("/nowhere"))


def test_the_config_overrides_the_model_without_a_word(workspace: Workspace, tmp_path: Path) -> None:
    config = workspace.config(log_dir=tmp_path, model__rope_theta=500000.0, model__num_layers=1)
    model = read_settings(config, REHEARSAL).model_config
    assert (model["rope_theta"], model["num_hidden_layers"], model["head_dim"]) == (500000.0, 1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed_strategy__tensor_model_parallel_size": 3}, "tp=3 must divide num_attention_heads=8"),
        ({"distributed_strategy__kv_replicator": 2}, "must equal tp=4"),
        ({"distributed_strategy__pipeline_model_parallel_size": 3}, "needs at least 3 layers"),
        ({"data__seq_length": 126, "model__encoder_seq_length": 126}, "sequence length 126 is not divisible by tp 4"),
        ({"trainer__max_step": 3}, "unexpected keyword argument 'max_step'"),
        ({"exp_manager__resume": True}, "Key 'resume' not in 'ExpManagerConfig'"),
        ({"exp_manager__checkpoint_callback_params__every": 1}, "Key 'every' not in 'CallbackParams'"),
        ({"seed": 0}, "should be a positive integer"),
        ({"model_source": "megatron"}, "megatron"),
        ({"model__optim__name": "sgd"}, "Cannot resolve optimizer 'sgd'"),
    ],
)
def test_refused_before_it_starts(workspace: Workspace, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(
        (ValueError, TypeError, AssertionError, NotImplementedError, KeyError), match=re.escape(message)
    ):
        read_settings(workspace.config(log_dir=tmp_path, **changes), REHEARSAL)


def test_real_instance_types_have_their_rules(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not a multiple of 2048"):
        read_settings(workspace.config(log_dir=tmp_path), INSTANCES["trn1.32xlarge"])
    with pytest.raises(RuntimeError, match="NeuronCore\\(s\\) not available"):
        check_cores(INSTANCES["trn1.2xlarge"], 4)
    with pytest.raises(RuntimeError, match="Unsupported topology"):
        check_cores(INSTANCES["trn1.32xlarge"], 6)
    check_cores(INSTANCES["trn1.32xlarge"], 32)
    check_cores(REHEARSAL, 6)


def test_compile_only_forces_ten_steps_and_no_checkpoints(
    workspace: Workspace, tmp_path: Path, trainer_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPILE", "1")
    config = workspace.config(log_dir=tmp_path)
    apply_environment(config)
    settings = read_settings(config, REHEARSAL)
    assert settings.optimization.max_steps == 10
    assert not settings.experiment.create_checkpoints


def test_where_the_experiment_goes(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_EXPM_VERSION", "28")
    implicit = workspace.config(log_dir=tmp_path, exp_manager__explicit_log_dir=None, exp_manager__exp_dir="/exp")
    assert read_settings(implicit, REHEARSAL).experiment.checkpoints == Path("/exp/hf_rehearsal/28/checkpoints")
    assert read_settings(workspace.config(log_dir=tmp_path), REHEARSAL).experiment.log_dir == tmp_path


def test_faults() -> None:
    assert parse_faults("") == Faults()
    assert parse_faults("train:kill@5, train:slow=0.5,compile:graph-fails") == Faults(
        graph_fails=True, at={5: "kill"}, seconds_per_step=0.5
    )
    with pytest.raises(ValueError, match="train:kill"):
        parse_faults("train:kill")
    Faults(at={5: "exit"}).before_step(5, resumed=True)
    with pytest.raises(RuntimeError, match="train:exit@5"):
        Faults(at={5: "exit"}).before_step(5, resumed=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.79, "6.790"),
        (0.0, "0.000"),
        (5.45e-5, "5.45e-5"),
        (188.0, "188.0"),
        (1953.125, "1.95e+3"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_look_like_lightnings(value: float, text: str) -> None:
    assert format_number(value) == text
