"""Run the command line as ``python -m shardwise``."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
