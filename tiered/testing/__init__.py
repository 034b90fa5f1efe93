"""Test tools for users: suites for tiers, links and policies, fault injection, and links that tests control."""

from tiered.testing.link_suite import LinkSuite
from tiered.testing.policy_suite import PolicySuite
from tiered.testing.store_suite import StoreSuite
from tiered.testing.tier_suite import TierSuite

__all__ = ["LinkSuite", "PolicySuite", "StoreSuite", "TierSuite"]
