"""Entry point: makes the tree importable if llmc is not installed, then runs the command."""

from bench.gpu.tree import make_importable

if __name__ == "__main__":
    make_importable()
    from bench.gpu.command import main  # imports llmc

    main()
