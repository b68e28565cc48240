"""Entry point of `python -m bench.gpu`."""

from bench.gpu.command import main

if __name__ == "__main__":
    main()
