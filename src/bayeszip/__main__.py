"""`python -m bayeszip` is the command line."""

from bayeszip.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
