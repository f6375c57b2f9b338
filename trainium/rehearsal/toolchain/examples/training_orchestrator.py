"""Started by torchrun, as NxDT's script of this name."""

from trainium.rehearsal.orchestrator import main

if __name__ == "__main__":
    main()
