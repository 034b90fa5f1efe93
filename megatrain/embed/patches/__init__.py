"""Replacements of torch's, transformers' and peft's behavior for offloaded modules. Every patch is in this package."""
