"""Entry point of ``megatrain-tier`` and ``python -m megatrain``."""


def run() -> None:
    """Run the command line. If the user interrupts the imports, exit without a traceback."""
    try:
        from .main import main

        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; nothing saved") from None


if __name__ == "__main__":
    run()
