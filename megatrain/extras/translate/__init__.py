"""Translation of other tools' configs: start at ``translate.translate_file``; the keys are in ``base.other_tools``."""
