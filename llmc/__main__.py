"""`python -m llmc`: the command line, where the folder of the `llmc` script is not on the path."""

from llmc.cli.__main__ import main

if __name__ == "__main__":
    main()
