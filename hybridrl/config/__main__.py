"""Write docs/config.md to standard output: `python -m hybridrl.config > docs/config.md`.

A module of its own, because Python warns when it executes a module that the package has already imported.
"""

import sys

from hybridrl.config.reference import PROGRAMS, markdown

if __name__ == "__main__":
    sys.stdout.write(markdown(PROGRAMS))
