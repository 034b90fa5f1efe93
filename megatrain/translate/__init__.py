"""Configs of other tools, translated into ours."""
