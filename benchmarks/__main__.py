import sys

from benchmarks.command import main

if __name__ == "__main__":  # not in a process that a suite spawns
    sys.exit(main())
