"""Eviction policies: pure ranking functions."""

from tiered.policies.base import Candidate, EvictionPolicy
from tiered.policies.belady import Belady
from tiered.policies.lru import LRU

__all__ = ["LRU", "Belady", "Candidate", "EvictionPolicy"]
