"""Interface of a machine for which runs are planned: devices, memory, drives and rates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.machine.file_systems import Space
from megatrain.machine.profiles import LoadedProfile
from megatrain.machine.table import TiersConfig


class Machine(ABC):
    """A machine for which runs are planned.

    Attributes:
        name: Name in messages.
        is_here: Whether this process runs on the machine, so that plans can query its drives and trust its rates.
    """

    name: str
    is_here: bool

    def resolve_device(self, name: str) -> torch.device:
        """Return a config's compute device. "auto" is CUDA if available.

        Raises:
            ConfigError: The config requests a GPU, but the machine has none.
        """
        if name == "cuda" and not self.has_gpu:
            reason = "torch finds no GPU that it can use" if self.is_here else f"the machine {self.name} has no GPU"
            raise ConfigError(
                "the config", [Problem("device", f'device = "cuda", but {reason}', 'Write "auto" or "cpu"')]
            )
        return torch.device("cuda" if self.has_gpu and name != "cpu" else "cpu")

    @property
    @abstractmethod
    def has_gpu(self) -> bool:
        """Whether layers can run on a GPU."""

    @property
    @abstractmethod
    def has_unified_memory(self) -> bool:
        """Whether GPU and CPU share one memory. False for separate memories with coherent access, such as GH200."""

    @property
    @abstractmethod
    def ram(self) -> Space:
        """Total and free RAM for this process."""

    @abstractmethod
    def gpu_memory(self, device: torch.device) -> Space:
        """Return the total and free memory of one GPU."""

    @abstractmethod
    def gpu_name(self, device: torch.device) -> str:
        """Return the name of the machine's GPU."""

    @abstractmethod
    def drive_spaces(self, table: TiersConfig, output_dir: Path) -> list[Space]:
        """Return the total bytes of each ``[[tiers.nvme]]`` path, and the bytes that the size "auto" resolves to."""

    @abstractmethod
    def drive_keys(self, paths: Sequence[Path]) -> list[str]:
        """Return the key of each path's drive in the profile."""

    @abstractmethod
    def can_bypass_ram(self, table: TiersConfig) -> bool:
        """Return whether blocks move directly between all drives and a GPU. The config can disable this.

        Raises:
            ConfigError: The config requires direct movement, but the machine does not support it.
        """

    @abstractmethod
    def rates(self) -> LoadedProfile:
        """Return the machine's rates, from which plans estimate times."""
