"""Run the command for ``megatrain-tier`` and ``python -m megatrain``."""


def run() -> None:
    """Run the command line. An interrupt during its imports ends it without a traceback, as later ones do."""
    try:
        from .main import main

        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; nothing saved") from None


if __name__ == "__main__":
    run()
