"""The model, the rows and the interpreter that all light runs share."""

import sys
from pathlib import Path

from blocks import NeuronToolchain

HERE = Path(__file__).parent
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RECIPE = HERE / "recipe.yaml"

# The converter is the real one. What needs torch and transformers is answered by the scripts in toolchain/project.
INTERPRETER = """\
#!/bin/bash
case "$1 ${{2-}}" in
'-m trainium.model.export' | '-m trainium.model.evaluate') exec {python} -P {scripts}/"${{2##*.}}".py "${{@:3}}" ;;
esac
exec {python} "$@"
"""


def write_sources(folder: Path) -> tuple[str, ...]:
    """Model, rows and interpreter in `folder`; the overrides that name them."""
    from trainium.rehearsal.model import write_dataset, write_model  # torch

    write_model(folder / "model", **SIZES)
    write_dataset(folder / "rows")
    interpreter(folder).write_text(INTERPRETER.format(python=sys.executable, scripts=HERE / "toolchain/project"))
    interpreter(folder).chmod(0o755)
    return (f"model.source={folder / 'model'}", f"dataset.source={folder / 'rows'}")


def interpreter(folder: Path) -> Path:
    """What SlurmCluster.python is in the light runs."""
    return folder / "python"


def light_toolchain(step: float, save: float) -> NeuronToolchain:
    """The rehearsal's commands with a training that needs no torch; seconds for a step and for a save."""
    stand_in = NeuronToolchain.stand_in()
    variables = {"CHAOS_STEP_SECONDS": str(step), "CHAOS_SAVE_SECONDS": str(save)}
    return stand_in.model_copy(
        update={
            "examples": HERE / "toolchain" / "examples",
            "environment": {**stand_in.environment, **variables},
        }
    )


def slower(toolchain: NeuronToolchain, step: float) -> NeuronToolchain:
    """The same with so many seconds for a step."""
    return toolchain.model_copy(update={"environment": {**toolchain.environment, "CHAOS_STEP_SECONDS": str(step)}})
