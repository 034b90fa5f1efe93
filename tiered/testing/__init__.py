"""Shipped with the package: parts for testing stores, tiers and policies, used by our own tests too."""
