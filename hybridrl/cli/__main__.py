"""`python -m hybridrl.cli`: the `hybridrl` command."""

import sys

from hybridrl.cli.command import main

sys.exit(main())
