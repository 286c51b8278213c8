"""``python -m allhands`` is the command ``allhands``."""

from allhands.cli.main import main

if __name__ == "__main__":
    main()
