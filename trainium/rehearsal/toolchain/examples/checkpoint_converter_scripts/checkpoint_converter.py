"""Converts checkpoints between one torch file and NxD's shards, as NxDT's script of this name."""

from trainium.rehearsal.converter import main

if __name__ == "__main__":
    main()
