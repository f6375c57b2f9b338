"""The part of Hydra that NxDT uses, on OmegaConf: a config file and `key=value` overrides.

Hydra is not among this project's dependencies; what it refuses on the command line is refused here too, so that a
launch that would break on the cluster breaks in the rehearsal (Hydra 1.3: "basic override syntax").
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

# What Hydra's grammar takes as a value without quotes: letters, digits, these signs, and blanks inside.
_UNQUOTED = re.compile(r"(?:[A-Za-z0-9_/\-\\+.$%*@?|:]|[ \t](?=.*\S)|\$\{[^{}]*\})*")
_KEY = re.compile(r"(?P<add>\+{0,2})(?P<key>[A-Za-z_][\w.\-/@]*)")


class ConfigCompositionError(Exception):
    """Hydra would stop here."""


def register_resolvers() -> None:
    """`multiply`, which NxDT registers beside OmegaConf's own `oc.*`."""
    OmegaConf.register_new_resolver("multiply", lambda x, y: x * y, replace=True)


def compose(argv: Sequence[str], script_folder: Path) -> DictConfig:
    """The config that Hydra would hand to the training script.

    Args:
        argv: `--config-path` (relative to the script's folder, or absolute), `--config-name`, then overrides.

    Raises ConfigCompositionError with Hydra's message.
    """
    parser = argparse.ArgumentParser(prog="training_orchestrator.py", allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path, default=Path("conf"))
    parser.add_argument("--config-name", "-cn", default="megatron_gpt_config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(list(argv))
    folder = script_folder / arguments.config_path
    file = folder / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    if not folder.is_dir():
        raise ConfigCompositionError(
            f"Primary config directory not found.\nCheck that the config directory '{folder}' exists and readable"
        )
    if not file.is_file():
        raise ConfigCompositionError(
            f"Cannot find primary config '{arguments.config_name}'. Check that it's in your config search path.\n"
            f"Config search path:\n\tprovider=main, path=file://{folder}"
        )
    register_resolvers()
    config = OmegaConf.load(file)
    if not isinstance(config, DictConfig):
        raise ConfigCompositionError(f"primary config '{file}' must be a Config dictionary, got list")
    OmegaConf.set_struct(config, True)
    for override in arguments.overrides:
        _apply(config, override)
    return config


def _apply(config: DictConfig, override: str) -> None:
    name, separator, text = override.partition("=")
    match = _KEY.fullmatch(name)
    if not separator or not match:
        raise ConfigCompositionError(f"missing EQUAL at '<EOF>'\nError parsing override '{override}'")
    key, value = match["key"], _value(override, text)
    try:
        OmegaConf.update(config, key, value, force_add=bool(match["add"]))
    except (ConfigAttributeError, ConfigKeyError) as error:
        raise ConfigCompositionError(
            f"Could not override '{key}'.\nTo append to your config use +{override}\n{error}"
        ) from error


def _value(override: str, text: str) -> Any:
    """The parsed value. In quotes it is a string, whatever is in it; lists and dictionaries are read as YAML."""
    if not text:
        return ""
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if not text.startswith(("[", "{")) and not _UNQUOTED.fullmatch(text):
        bad = next((char for char in text if not _UNQUOTED.fullmatch(char)), text)
        raise ConfigCompositionError(
            f"mismatched input '{bad}' expecting <EOF>\nError parsing override '{override}'\n"
            "See https://hydra.cc/docs/1.2/advanced/override_grammar/basic for details"
        )
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return parsed["value"]
