"""Whether a run's model exists under its name, in a folder or on a hub: without importing torch or transformers, and without
reading the model."""

from __future__ import annotations

from pathlib import Path

from ..common.modelscope import PREFIX, is_on_modelscope, require_on_modelscope
from ..errors import ConfigError, first_line

HUB_S = 10.0  # seconds for the hub to answer whether a name exists
CONFIG = "config.json"  # what every model has


def require_model(path: str, key: str) -> None:
    """Raises ConfigError naming `key`, unless `path` is a folder with a config, a cached name of a hub, or a name on it. The last
    takes up to `HUB_S`. HubError: ModelScope's hub cannot be reached."""
    if is_on_modelscope(path):
        return require_on_modelscope(path, key)
    folder = Path(path)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{key}: folder {path!r} holds no usable config: it has no {CONFIG}")
        return
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(path, CONFIG), str):
            return
        HfApi().model_info(path, timeout=HUB_S)
    # All errors: the hub client raises those of its HTTP library, and the library changes between releases.
    except Exception as error:
        raise ConfigError(
            f"{key}: {path!r} is no folder in {Path.cwd()}, and the hub gave no model of that name: {first_line(error)}; allowed "
            f"are a folder with a model, which `slipstream init-model` makes, a name on the hub, and {PREFIX}ORG/NAME"
        ) from error
