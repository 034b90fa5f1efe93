"""Configs of other tools, translated into ours: start at ``translate.translate_file``; the keys are in ``names``."""
