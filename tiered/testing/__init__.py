"""Shipped with the package: suites that a tier, a link or a policy passes, faulty drives, links moved by hand."""

from tiered.testing.link_suite import LinkSuite
from tiered.testing.policy_suite import PolicySuite
from tiered.testing.store_suite import StoreSuite
from tiered.testing.tier_suite import TierSuite

__all__ = ["LinkSuite", "PolicySuite", "StoreSuite", "TierSuite"]
