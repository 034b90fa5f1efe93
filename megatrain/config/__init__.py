"""Config files: schema, loading and checks."""

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.sizes import Size
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.resolved import config_from_toml, to_toml, write_resolved

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "Problem",
    "Size",
    "config_from_toml",
    "load_config",
    "to_toml",
    "write_resolved",
]
